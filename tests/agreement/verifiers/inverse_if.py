"""inverse_if."""

from __future__ import annotations

import random
from typing import Any

from tests.agreement.answers import Items
from tests.agreement.gym import Gym
from tests.agreement.judges import (
    EMPTY,
    LEAST,
    MASKED,
    RESULT_STYLES,
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

JUDGES = {"judge_model": Ours()}


def rows(gym: Gym, rng: random.Random) -> list[dict[str, Any]]:
    found = read(gym.data("inverse_if"))
    made = []
    for number in range(400):
        row = found[number % len(found)]
        rubric = [
            {**item, "criteria": f"{item['criteria']} {task(number)} (item {place})"}
            for place, item in enumerate(row["rubric"])
        ]
        made.append({**row, "number": number, "rubric": rubric})
    return made


def answer(row: dict[str, Any], rng: random.Random) -> tuple[str, Items]:
    items = told(rng, '{"result": "PASS"}')
    said = [say(RESULT_STYLES, rng, "PASS", "FAIL", items) for _ in row["rubric"]]
    SCRIPTS[row["number"]] = same([(f"(item {place})", reply) for place, (_, reply) in enumerate(said)])
    return odd(style for style, _ in said), items


def theirs(gym: Gym) -> Any:
    return judged_grader(gym, "inverse_if", "InverseIF", "inverse_if")


RULES = (MASKED, EMPTY, LEAST)
