"""equivalence_llm_judge as its nl2bash agent has it: the command out of a fence, asked twice with the order swapped."""

from __future__ import annotations

import random
from typing import Any

from nemotron_steps.environments.agents import AGENTS
from tests.agreement.answers import Items, styled
from tests.agreement.gym import Gym
from tests.agreement.judges import told
from tests.agreement.verifiers import equivalence_llm_judge as open_questions

ENVIRONMENT = "equivalence_llm_judge"
JUDGES, RULES, rows = open_questions.JUDGES, open_questions.RULES, open_questions.rows


def answer(row: dict[str, Any], rng: random.Random) -> tuple[str, Items]:
    items = styled("Answer:\n```bash\nls | wc -l\n```", "Answer: ```ls```", rng)[1]
    return open_questions.judged(row, items if rng.random() < 0.5 else told(rng, "[[A=B]]"), rng)


def settings(gym: Gym) -> dict[str, Any]:
    return dict(AGENTS["nl2bash_equivalency_simple_agent"].settings)


def theirs(gym: Gym) -> Any:
    return open_questions.grader(gym, "nl2bash-equivalency")
