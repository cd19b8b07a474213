"""lc_niah."""

from __future__ import annotations

import json
import random
from typing import Any

from nemotron_steps.environments.responses import last_user_text, reasoning_item
from tests.agreement.answers import Items, pick, read, sample, styled
from tests.agreement.compare import FINAL_MESSAGE
from tests.agreement.gym import Gym

FINALS = {
    "Final Answer: [%N]": 60,
    "**Final Answer: [%N]**": 8,
    "Final Answer: [%N].": 4,
    "Final answer: [%N]": 4,
    "Final Answer:\n[%N]": 3,
    "\\boxed{%N}": 3,
    "The nodes are %N.": 4,
    "Final Answer: %N": 4,
    "Final Answer: [[%N]]": 2,
}


def rows(gym: Gym, rng: random.Random) -> list[dict[str, Any]]:
    return read(gym.data("lc_niah"))


def answer(row: dict[str, Any], rng: random.Random) -> tuple[str, Items]:
    right = json.loads(row["expected_answer"])
    prompt = last_user_text(row)
    kind = pick(rng, {"right": 45, "one less": 15, "one more": 15, "others": 15, "none": 10})
    known = [word for word in prompt.split() if len(word) == 10 and word.isalnum()]
    nodes = list(right)
    if kind == "one less":
        nodes = nodes[:-1]
    elif kind == "one more":
        nodes.append(rng.choice(known))
    elif kind == "others":
        nodes = sample(rng, known, 3)
    elif kind == "none":
        nodes = []
    quote = pick(rng, {"": 8, '"': 2, "'": 1})

    def final(chosen: list[str]) -> str:
        return shape.replace("%N", ", ".join(f"{quote}{node}{quote}" for node in chosen))

    shape = pick(rng, FINALS)
    style, items = styled(final(nodes), final(sample(rng, known, 2)), rng)
    if rng.random() < 0.4 and items[0]["type"] != "reasoning":
        begin = rng.randrange(len(prompt) // 2)
        copied = prompt[begin : begin + rng.choice((40, 200, 1500))]
        items = [reasoning_item(f"I copy the edges: {copied}. Then I look for the targets."), *items]
        style += ", copied"
    return f"{kind}, {style}", items


def theirs(gym: Gym) -> Any:
    return gym.grader("lc_niah", "LCNIAH")


RULES = (FINAL_MESSAGE,)
