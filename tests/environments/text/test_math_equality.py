from __future__ import annotations

import pytest

from nemotron_steps.environments.text.math_with_judge import compare


@pytest.mark.parametrize(
    ("answer", "expected", "equal"),
    [
        ("1/2", r"\frac{1}{2}", True),
        ("0.5", r"\frac{1}{2}", True),
        ("1/3", r"\frac{1}{2}", False),
        ("", "3", False),
        ("3", "", None),
        # An interval answers to an inequality that is expected; an inequality does not answer to an interval.
        ("(1, 2)", "1 < x < 2", True),
        ("1 < x < 2", "(1, 2)", False),
    ],
)
def test_answers_are_compared_with_what_is_expected(answer: str, expected: str, equal: bool | None) -> None:
    assert compare(answer, expected) is equal
