"""Faults are made where they are meant, and change nothing beside them."""

from __future__ import annotations

import pytest

from nemotron_steps.steps.data_prep.swe.mutations import mutations_of


@pytest.mark.parametrize(
    ("kind", "line", "broken"),
    [
        ("constant", 'x = "é€𝄞", 3', {'x = "é€𝄞", 4'}),
        ("arguments", 'f("ß", "日本")', {'f("日本", "ß")'}),
        ("operator", "é + ü", {"é - ü", "é * ü"}),
        ("comparison", 'a["ä"] < b', {'a["ä"] <= b', 'a["ä"] > b'}),
        ("boolean", 'not "ö" in é', {'"ö" in é'}),
    ],
)
def test_letters_of_several_bytes_are_one_column_each(kind: str, line: str, broken: set[str]) -> None:
    found = mutations_of("a.py", f"# é\n{line}\n", [kind])  # type: ignore[list-item]
    assert {mutation.broken for mutation in found} == broken
    assert {(mutation.line, mutation.correct) for mutation in found} == {(2, line)}
    assert {mutation.source for mutation in found} == {f"# é\n{text}\n" for text in broken}
