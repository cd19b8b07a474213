"""Grading a policy on prompts it does not train on."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from nemotron_steps.engine.types import Rollout, RolloutGroup


@dataclass(frozen=True)
class EvaluationResult:
    """Means over graded samples; ungraded ones are counted, never scored."""

    reward: float
    standard_error: float
    """Of the mean reward, over prompts."""
    samples: int
    ungraded: int
    truncation_rate: float
    answer_tokens: float
    reward_by_environment: dict[str, float]
    components: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        """As JSON-serialisable fields."""
        return asdict(self)


def summarize(groups: Sequence[RolloutGroup]) -> EvaluationResult:
    """Aggregate graded groups. The reward is the mean over prompts of the mean over their samples."""
    by_prompt: list[float] = []
    by_environment: dict[str, list[float]] = defaultdict(list)
    components: dict[str, list[float]] = defaultdict(list)
    rollouts: list[Rollout] = []
    for group in groups:
        graded = [r for r in group.rollouts if r.failure is None]
        rollouts.extend(group.rollouts)
        if graded:
            by_prompt.append(sum(r.reward for r in graded) / len(graded))
        for rollout in graded:
            by_environment[rollout.environment].append(rollout.reward)
            for name, value in rollout.components.items():
                components[name].append(value)
    mean = sum(by_prompt) / len(by_prompt) if by_prompt else math.nan
    spread = (
        math.sqrt(sum((r - mean) ** 2 for r in by_prompt) / (len(by_prompt) - 1)) if len(by_prompt) > 1 else math.nan
    )
    count = max(1, len(rollouts))
    return EvaluationResult(
        reward=mean,
        standard_error=spread / math.sqrt(len(by_prompt)) if by_prompt else math.nan,
        samples=len(rollouts),
        ungraded=sum(r.failure is not None for r in rollouts),
        truncation_rate=sum(r.truncated for r in rollouts) / count,
        answer_tokens=sum(float(r.metadata.get("answer_tokens") or 0) for r in rollouts) / count,
        reward_by_environment={name: sum(v) / len(v) for name, v in sorted(by_environment.items())},
        components={name: sum(v) / len(v) for name, v in sorted(components.items())},
    )
