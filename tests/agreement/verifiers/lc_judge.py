"""equivalence_llm_judge as its long-context agent has it, with [[A=B]] and [[A!=B]] for labels: its config has CORRECT
and INCORRECT."""

from __future__ import annotations

from typing import Any

from nemotron_steps.environments.agents import AGENTS
from tests.agreement.gym import Gym
from tests.agreement.verifiers import equivalence_llm_judge as open_questions

ENVIRONMENT = "equivalence_llm_judge"
JUDGES, RULES = open_questions.JUDGES, open_questions.RULES
rows, answer = open_questions.rows, open_questions.answer


def settings(gym: Gym) -> dict[str, Any]:
    return dict(AGENTS["lc_judge_simple_agent"].settings)


def theirs(gym: Gym) -> Any:
    return open_questions.grader(gym, "lc_judge")
