"""equivalence_llm_judge with the defaults of its code: open questions, some with a regular expression of their own."""

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
from tests.agreement.rows import asking

JUDGES = {"judge_model": Ours()}
LABELS = {"judge_equal_label": "[[A=B]]", "judge_not_equal_label": "[[A!=B]]"}
EXPECTED = ("Darwin", "3.5 km", "find . -name '*.py' | wc -l", "All of it, and why. " * 8)
PATTERNS = (None, None, r"Answer:\s*(.+)", r"\\boxed\{(.*?)\}", r"(?:Final|Answer): (\S+)( km)?", r"^- (.*)$")


def rows(gym: Gym, rng: random.Random) -> list[dict[str, Any]]:
    return [
        asking(
            f"QUESTION: Which is it? {task(number)}",
            number=number,
            expected_answer=rng.choice(EXPECTED),
            **({"template_metadata": {"output_regex": pattern}} if pattern else {}),
        )
        for number in range(300)
        for pattern in (rng.choice(PATTERNS),)
    ]


def answer(row: dict[str, Any], rng: random.Random) -> tuple[str, Items]:
    return judged(row, told(rng, "[[A=B]]"), rng)


def judged(row: dict[str, Any], items: Items, rng: random.Random) -> tuple[str, Items]:
    """An answer, and what the judges will say about it."""
    said = [say(LABEL_STYLES, rng, "[[A=B]]", "[[A!=B]]", items) for _ in range(2)]
    SCRIPTS[row["number"]] = same([("", reply) for _, reply in said])
    return odd(style for style, _ in said), items


def grader(gym: Gym, config: str, **settings: Any) -> Any:
    folder = gym.path / "resources_servers" / "equivalence_llm_judge" / "prompt_templates"
    prompt = str(folder / "equivalence_llm_judge.txt")
    settings = {**LABELS, "judge_prompt_template_fpath": prompt, **settings}
    return judged_grader(gym, "equivalence_llm_judge", "LLMJudge", config, **settings)


def theirs(gym: Gym) -> Any:
    config = gym.module("equivalence_llm_judge").LLMJudgeResourcesServerConfig
    own = ("extraction_length_threshold", "check_full_generation_on_fail", "reward_if_full_generation_succeeds")
    defaults = {name: config.model_fields[name].default for name in own}
    return grader(gym, "equivalence_llm_judge", **defaults)


RULES = (EMPTY, MASKED, LEAST)
