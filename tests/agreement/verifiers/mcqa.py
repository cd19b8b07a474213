"""mcqa, in all its grading modes. `lenient_answer_colon_md` is there a setting of the server only."""

import random
import re
from typing import Any

from tests.agreement.answers import Items, pick, read, styled
from tests.agreement.compare import FINAL_MESSAGE, Rule
from tests.agreement.gym import Gym

MARKDOWN = "lenient_answer_colon_md"
MODES = ("strict_single_letter_boxed", "lenient_boxed", "lenient_answer_colon", MARKDOWN)

BOXED = {
    "\\boxed{%L}": 40,
    "$\\boxed{%L}$": 6,
    "\\boxed{\\text{%L}}": 6,
    "\\boxed{%L: %T}": 6,
    "\\boxed{%L) %T}": 3,
    "\\boxed{(%L)}": 3,
    "\\boxed{%T}": 6,
    "\\boxed{%l}": 3,
    "\\boxed{\\mathrm{%L}}": 1,
    "\\boxed{\\textbf{%L}}": 1,
    "\\fbox{%L}": 0.5,
    "\\boxed{%L} or \\boxed{%O}": 2,
    "\\boxed{%L and %O}": 2,
    "\\boxed{%L": 1,
    "\\boxed{}": 0.5,
    "\\boxed{Option %L}": 2,
    "The answer is **%L**.": 5,
    "Answer: %L": 4,
    "Answer: \\boxed{%L}": 4,
}
COLON = {
    "Answer: %L": 40,
    "**Answer: %L**": 8,
    "**Answer:** %L": 6,
    "answer: %l": 3,
    "Answer: %T": 8,
    "Answer: %L. %T": 8,
    "Answer: (%L)": 3,
    "Answer: \\text{%L}": 2,
    "Answer: %L because the others are wrong.": 4,
    "Final Answer: %L": 6,
    "Answer: %L, %O": 2,
    "Answer: \\boxed{%L}": 4,
    "The answer is %L.": 4,
    "Answer:\n%L": 3,
    "Answer: %L\nAnswer: %O": 2,
}
"""Format → weight; %L the letter, %l in lower case, %T the option's text, %O another letter."""


def rows(gym: Gym, rng: random.Random) -> list[dict[str, Any]]:
    plain = read(gym.data("mcqa"))
    templates = read(gym.data("mcqa", "example_with_template_metadata.jsonl"))
    return [{**row, "grading_mode": mode} for row in plain for mode in MODES] + templates


def answer(row: dict[str, Any], rng: random.Random) -> tuple[str, Items]:
    texts = {letter: str(text) for option in row["options"] for letter, text in option.items()}
    right = row["expected_answer"]
    wrong = rng.choice([letter for letter in texts if letter != right])
    kind = pick(rng, {"right": 6, "wrong": 4})
    letter, other = (right, wrong) if kind == "right" else (wrong, right)
    colon = "colon" in row.get("grading_mode", "") or "template_metadata" in row
    shape = pick(rng, COLON if colon else BOXED)

    def filled(chosen: str, left: str) -> str:
        text = shape.replace("%L", chosen).replace("%l", chosen.lower()).replace("%O", left)
        return text.replace("%T", texts[chosen])

    style, items = styled(filled(letter, other), filled(other, letter), rng)
    return f"{kind}, {style}", items


def theirs(gym: Gym) -> Any:
    by_row = gym.grader("mcqa", "MCQA")
    markdown = gym.grader("mcqa", "MCQA", grading_mode=MARKDOWN)

    async def grade(row: dict[str, Any], items: Items) -> float | str:
        if row.get("grading_mode") != MARKDOWN:
            return await by_row(row, items)
        return await markdown({key: value for key, value in row.items() if key != "grading_mode"}, items)

    return grade


RULES = (
    FINAL_MESSAGE,
    Rule(
        "the last complete box counts, the last `Answer:` in lenient_answer_colon (there the first), `\\fbox` is a box,"
        " and `\\mathrm` and `\\textbf` are looked through as `\\text` is",
        lambda answer: (
            len(re.findall(r"answer\s*:|\\\\f?boxed|\\\\fbox", answer.final, re.IGNORECASE)) > 1
            or any(name in answer.final for name in ("fbox", "mathrm", "textbf"))
        ),
    ),
)
