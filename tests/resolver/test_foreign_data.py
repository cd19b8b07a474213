"""What is offered for data that is no artifact."""

from typing import Any

import pytest

from nemotron_steps.session.supplied_data import unknown_rows


@pytest.mark.parametrize(
    ("row", "columns", "fields"),
    [
        (
            {"label": 2, "text": "1 + 1?", "more": ["x"], "third": "z"},
            ["text", "more"],
            "fields label, more, text, third",
        ),
        ({"empty": "", "none": [], "my text": "x", "-a": "x"}, [], "fields -a, empty, my text, none"),
        ({}, [], "fields none"),
    ],
)
def test_columns_that_may_be_prompts_are_offered(row: dict[str, Any], columns: list[str], fields: str) -> None:
    found = unknown_rows("my rows.jsonl", "rl_prompts", row)
    assert found.found == fields
    if columns:
        assert [hint.partition("prompt_column=")[2].split()[0] for hint in found.hints] == columns
        assert "--input dataset='my rows.jsonl' " in found.hints[0]
    else:
        assert found.hints == ("steps types   # what rl_prompts is",)
