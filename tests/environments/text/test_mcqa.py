from __future__ import annotations

import asyncio
from typing import Any

import pytest

from nemotron_steps.environments.base import Response, Session
from nemotron_steps.environments.registry import create
from nemotron_steps.errors import DataError

ROW: dict[str, Any] = {
    "responses_create_params": {"input": "Which?"},
    "options": [{"A": "red"}, {"B": "dark blue"}, {"C": "blue"}],
    "expected_answer": "B",
}


def grade(text: str, **row: Any) -> float | None:
    environment = create("mcqa")
    environment.check_row({**ROW, **row}, "f:1")
    return asyncio.run(environment.verify({**ROW, **row}, Response(text), Session())).reward


@pytest.mark.parametrize(
    ("text", "mode", "reward"),
    [
        (r"\boxed{B}", "strict_single_letter_boxed", 1.0),
        (r"\boxed{A} wait \boxed{B}", "strict_single_letter_boxed", 1.0),
        (r"\boxed{B} wait \boxed{A}", "strict_single_letter_boxed", 0.0),
        (r"\boxed{(B).}", "strict_single_letter_boxed", 1.0),
        (r"\boxed{\text{B}}", "strict_single_letter_boxed", 1.0),
        (r"\boxed{b}", "strict_single_letter_boxed", 0.0),
        (r"\boxed{AB}", "strict_single_letter_boxed", 0.0),
        (r"\boxed{dark blue}", "strict_single_letter_boxed", 0.0),
        ("B", "strict_single_letter_boxed", 0.0),
        (r"\boxed{\text{red}}", "lenient_boxed", 0.0),
        (r"\boxed{dark blue}", "lenient_boxed", 0.0),  # "blue" is inside it as well: ambiguous
        (r"\boxed{B}", "lenient_boxed", 1.0),
        ("Answer: b", "lenient_answer_colon", 1.0),
        ("ANSWER : Dark  Blue", "lenient_answer_colon", 1.0),
        ("Answer: A\nAnswer: B", "lenient_answer_colon", 1.0),
        ("Answer: blue", "lenient_answer_colon", 0.0),
        (r"\boxed{B}", "lenient_answer_colon", 0.0),
    ],
)
def test_modes(text: str, mode: str, reward: float) -> None:
    assert grade(text, grading_mode=mode) == reward


def test_lenient_box_reads_an_option_text() -> None:
    assert grade(r"\boxed{it is red}", grading_mode="lenient_boxed", expected_answer="A") == 1.0


def test_a_template_regex_beats_the_mode() -> None:
    template = {"output_regex": r"Choice=\[(.+?)\]"}
    assert grade("Choice=[A] Choice=[b]", template_metadata=template) == 1.0
    assert grade(r"\boxed{B}", template_metadata=template) == 0.0


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"options": []}, "options"),
        ({"expected_answer": "D"}, "expected_answer"),
        ({"grading_mode": "loose"}, "grading_mode"),
        ({"template_metadata": {"output_regex": "("}}, "template_metadata.output_regex"),
        ({"template_metadata": {"output_regex": "x"}}, "template_metadata.output_regex"),
    ],
)
def test_unusable_rows_are_refused(change: dict[str, Any], field: str) -> None:
    with pytest.raises(DataError) as caught:
        create("mcqa").check_row({**ROW, **change}, "f:2")
    assert caught.value.where == f"f:2 field {field}"
