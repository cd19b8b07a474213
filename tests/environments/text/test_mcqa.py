import asyncio
from typing import Any

import pytest

from nemotron_steps.environments.base import Response, Session
from nemotron_steps.environments.registry import create

ROW: dict[str, Any] = {
    "responses_create_params": {"input": "Which?"},
    "options": [{"A": "red"}, {"B": "dark blue"}, {"C": "blue"}],
    "expected_answer": "B",
}


def grade(text: str, **row: Any) -> float | None:
    environment = create("mcqa")
    environment.check_row({**ROW, **row}, "f:1")

    async def run() -> float | None:
        verdict = await environment.verify({**ROW, **row}, Response(text), Session())
        await environment.close()
        return verdict.reward

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("text", "mode", "reward"),
    [
        (r"\boxed{B}", "strict_single_letter_boxed", 1.0),
        (r"\boxed{B} wait \boxed{A}", "strict_single_letter_boxed", 0.0),
        (r"\boxed{(B).}", "strict_single_letter_boxed", 1.0),
        (r"\boxed{\text{B}}", "strict_single_letter_boxed", 1.0),
        (r"\boxed{b}", "strict_single_letter_boxed", 0.0),
        (r"\boxed{B: dark blue}", "strict_single_letter_boxed", 1.0),
        (r"\boxed{\text{B) dark blue}}", "strict_single_letter_boxed", 1.0),
        (r"\boxed{B dark blue}", "strict_single_letter_boxed", 0.0),
        (r"\boxed{Blue: B}", "strict_single_letter_boxed", 0.0),
        (r"\boxed{dark blue}", "strict_single_letter_boxed", 0.0),
        (r"\boxed{\text{red}}", "lenient_boxed", 0.0),
        (r"\boxed{dark blue}", "lenient_boxed", 0.0),  # "blue" is inside it as well: ambiguous
        ("Answer: b", "lenient_answer_colon", 1.0),
        ("ANSWER : Dark  Blue", "lenient_answer_colon", 1.0),
        ("Answer: A\nAnswer: B", "lenient_answer_colon", 1.0),
        ("**Answer: B**", "lenient_answer_colon", 0.0),
        ("**Answer: B**", "lenient_answer_colon_md", 1.0),
        ("**Answer:** b because it is blue", "lenient_answer_colon_md", 1.0),
        ("Answer: B\nAnswer: none", "lenient_answer_colon_md", 1.0),
        ("Answer: A or B", "lenient_answer_colon_md", 0.0),
        ("Answer: blue", "lenient_answer_colon_md", 0.0),
        ("Answer: blue", "lenient_answer_colon", 0.0),
        (r"\boxed{B}", "lenient_answer_colon", 0.0),
    ],
)
def test_modes(text: str, mode: str, reward: float) -> None:
    assert grade(text, grading_mode=mode) == reward


def test_a_text_that_two_options_have_is_neither_letter() -> None:
    row = {"options": [{"A": "red"}, {"B": "Red"}, {"C": "blue"}], "grading_mode": "lenient_answer_colon"}
    assert [grade("Answer: red", **row, expected_answer=key) for key in "AB"] == [0.0, 0.0]
    assert grade("Answer: blue", **row, expected_answer="C") == 1.0


@pytest.mark.parametrize(
    ("regex", "text", "reward"),
    [
        (r"Choice=\[(.+?)\]", "Choice=[A] Choice=[b]", 1.0),
        (r"choice=\[(.+?)\]", "CHOICE=[B]", 1.0),  # case does not matter
        (r"Choice=\[(.+?)\]", "Choice=[dark  blue]", 1.0),
        (r"Choice=\[(.+?)\]", r"Choice=[A] \boxed{B}", 0.0),  # what the regex finds counts
        (r"Choice=\[(.+?)\]", r"Choice=[Z] \boxed{B}", 0.0),  # even where it is no option
        (r"Choice=\[(.+?)\]", r"\boxed{B}", 1.0),  # where it finds nothing, the mode does
        (r"Choice=\[(.+?)\]", r"Choice=[mauve] \boxed{B}", 1.0),
        ([r"Answer: (\w)", r"Antwort: (\w)"], "Antwort: B. Answer: A", 0.0),
        (r"(?:(x)|(y)) (\w)", "y B", 0.0),  # the first group with text
        ("الإجابة: ([أ-د])", "الإجابة: ب", 1.0),
        (r"Answer: (\w)", "Answer: Ｂ", 1.0),
    ],
)
def test_a_rows_own_regexes_come_before_the_mode(regex: Any, text: str, reward: float) -> None:
    assert grade(text, template_metadata={"output_regex": regex}) == reward


def test_a_regex_may_find_a_key_that_the_options_lack() -> None:
    row = {"expected_answer": "D", "template_metadata": {"output_regex": r"Answer: (\w)"}}
    assert grade("Answer: d", **row) == 1.0
    assert grade("Answer: d", **row, options=None) == 1.0


@pytest.mark.parametrize("letters", ["أبجد", "অবডঢ"])
def test_letters_of_other_scripts_stand_for_the_first_four(letters: str) -> None:
    options = [{"a": "1"}, {"b": "2"}, {"C": "3"}, {"D": "4"}]  # of any case
    environment = create("mcqa")

    async def rewards() -> list[float | None]:
        found = []
        for letter, key in zip(letters, "ABCD", strict=True):
            row = {"options": options, "expected_answer": key, "template_metadata": {"output_regex": "-> (.)"}}
            environment.check_row({**ROW, **row}, "f:1")
            verdict = await environment.verify({**ROW, **row}, Response(f"-> {letter}"), Session())
            found.append(verdict.reward)
        await environment.close()
        return found

    assert asyncio.run(rewards()) == [1.0] * 4
