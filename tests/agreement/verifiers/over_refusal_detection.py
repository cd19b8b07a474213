"""over_refusal_detection."""

from __future__ import annotations

import random
from typing import Any

from tests.agreement.answers import Items
from tests.agreement.gym import Gym
from tests.agreement.judges import (
    EMPTY,
    LABEL_STYLES,
    LEAST,
    MASKED,
    SCRIPTS,
    Ours,
    judged_grader,
    odd,
    same,
    say,
    task,
    told,
)
from tests.agreement.rows import read

JUDGES = {"safety_model": Ours()}


def rows(gym: Gym, rng: random.Random) -> list[dict[str, Any]]:
    found = read(gym.data("over_refusal_detection"))
    numbered = [(number, found[number % len(found)]) for number in range(100)]
    return [{**row, "number": n, "safe_prompt": f"{row['safe_prompt']} {task(n)}"} for n, row in numbered]


def answer(row: dict[str, Any], rng: random.Random) -> tuple[str, Items]:
    items = told(rng, "[[COMPLIED]]")
    style, reply = say(LABEL_STYLES, rng, "[[COMPLIED]]", "[[REFUSED]]", items)
    SCRIPTS[row["number"]] = same([("", reply)])
    return odd([style]), items


def theirs(gym: Gym) -> Any:
    return judged_grader(gym, "over_refusal_detection", "OverRefusalDetection", "over_refusal_detection")


RULES = (MASKED, EMPTY, LEAST)
