"""multichallenge."""

from __future__ import annotations

import random
from typing import Any

from tests.agreement.answers import Items
from tests.agreement.gym import Gym
from tests.agreement.judges import EMPTY, LABEL_STYLES, MASKED, SCRIPTS, Ours, judged_grader, odd, same, say, task, told
from tests.agreement.rows import read

JUDGES = {"judge_model": Ours()}


def rows(gym: Gym, rng: random.Random) -> list[dict[str, Any]]:
    found = read(gym.data("multichallenge"))
    made = []
    for number in range(400):
        row = found[number % len(found)]
        rubric = [
            {
                "question": f"{item['question']} {task(number)} (item {place})",
                "pass_criteria": "NO" if rng.random() < 0.12 else "YES",
            }
            for place, item in enumerate(row["rubric"])
        ]
        made.append({**row, "number": number, "rubric": rubric})
    return made


def answer(row: dict[str, Any], rng: random.Random) -> tuple[str, Items]:
    items = told(rng, "[[YES]]")
    said = [say(LABEL_STYLES, rng, "[[YES]]", "[[NO]]", items) for _ in row["rubric"]]
    SCRIPTS[row["number"]] = same([(f"(item {place})", reply) for place, (_, reply) in enumerate(said)])
    return odd(style for style, _ in said), items


def theirs(gym: Gym) -> Any:
    return judged_grader(gym, "multichallenge", "MultiChallenge", "multichallenge")


RULES = (MASKED, EMPTY)
