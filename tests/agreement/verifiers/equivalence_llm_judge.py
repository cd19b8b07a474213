"""equivalence_llm_judge: open questions by the defaults of its code, commands by nl2bash's agent (out of a fence, asked
twice with the order swapped), and the long-context agent. The last has the labels CORRECT and INCORRECT there by its
config, and those of the others here."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

from nemotron_steps.environments.agents import AGENTS
from tests.agreement.answers import Items, styled
from tests.agreement.compare import Answer, graded
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

NAME = "equivalence_llm_judge"
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
    command = styled("Answer:\n```bash\nls | wc -l\n```", "Answer: ```ls```", rng)[1]
    items = command if rng.random() < 0.2 else told(rng, "[[A=B]]")
    said = [say(LABEL_STYLES, rng, "[[A=B]]", "[[A!=B]]", items) for _ in range(2)]
    SCRIPTS[row["number"]] = same([("", reply) for _, reply in said])
    return odd(style for style, _ in said), items


def variant(config: str, agent: str | None) -> Any:
    """The agent of a published config, or None for the defaults of the code, in both."""

    def theirs(gym: Gym) -> Any:
        server = gym.module(NAME)
        prompt = str(gym.path / "resources_servers" / NAME / "prompt_templates" / "equivalence_llm_judge.txt")
        own = ("extraction_length_threshold", "check_full_generation_on_fail", "reward_if_full_generation_succeeds")
        fields = server.LLMJudgeResourcesServerConfig.model_fields
        changed = {"judge_prompt_template_fpath": prompt, **LABELS}
        if agent is None:
            changed |= {key: fields[key].default for key in own}
        return judged_grader(gym, NAME, "LLMJudge", config, **changed)

    settings = dict(AGENTS[agent].settings) if agent else {}
    return SimpleNamespace(rows=rows, answer=answer, theirs=theirs, settings=lambda gym: settings, JUDGES=JUDGES)


VARIANTS = (
    variant(NAME, None),
    variant("nl2bash-equivalency", "nl2bash_equivalency_simple_agent"),
    variant("lc_judge", "lc_judge_simple_agent"),
)


async def compared(gym: Gym, count: int, seed: int) -> list[Answer]:
    """A third of the answers by each of the variants."""
    found = []
    for number, each in enumerate(VARIANTS):
        found += await graded(gym, NAME, each, -(-count // len(VARIANTS)), seed + 1000 * number)
    return found


RULES = (MASKED, EMPTY, LEAST)
