"""Grading a policy on prompts it does not train on."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any

from nemotron_steps.engine.types import Rollout, RolloutGroup


@dataclass(frozen=True)
class EvaluationResult:
    """Figures of one evaluation. Samples that nobody graded are counted, never scored."""

    reward: float
    standard_error: float
    """Of the mean reward, over prompts."""
    samples: int
    """Answers that the reward is of."""
    ungraded: int
    """Further answers, which nobody graded."""
    truncation_rate: float
    answer_tokens: float
    """Mean per answer; this and the truncation rate are of all answers."""
    reward_by_environment: dict[str, float]
    components: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        """As JSON-serialisable fields."""
        return asdict(self)

    def metrics(self, name: str) -> dict[str, float]:
        """As metrics `NAME/reward`, ..., `NAME/reward/ENVIRONMENT` and `NAME/components/COMPONENT`."""
        own = {f"{name}/{key}": value for key, value in asdict(self).items() if not isinstance(value, dict)}
        environments = {f"{name}/reward/{key}": value for key, value in self.reward_by_environment.items()}
        return own | environments | {f"{name}/components/{key}": value for key, value in self.components.items()}


def before_and_after(name: str, before: EvaluationResult, after: EvaluationResult) -> dict[str, Any]:
    """What a training changed, for its summary."""

    def change(figure: str) -> dict[str, float]:
        return {"before": getattr(before, figure), "after": getattr(after, figure)}

    return {
        f"{name}_reward": change("reward") | {figure: change(figure) for figure in ("standard_error", "samples")},
        f"{name}_answer_tokens": change("answer_tokens"),
        f"{name}_truncation_rate": change("truncation_rate"),
    }


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
    spread = stdev(by_prompt) if len(by_prompt) > 1 else math.nan
    count = max(1, len(rollouts))
    ungraded = sum(r.failure is not None for r in rollouts)
    return EvaluationResult(
        reward=fmean(by_prompt) if by_prompt else math.nan,
        standard_error=spread / math.sqrt(len(by_prompt) or 1),
        samples=len(rollouts) - ungraded,
        ungraded=ungraded,
        truncation_rate=sum(r.truncated for r in rollouts) / count,
        answer_tokens=sum(float(r.metadata.get("answer_tokens") or 0) for r in rollouts) / count,
        reward_by_environment={name: sum(v) / len(v) for name, v in sorted(by_environment.items())},
        components={name: sum(v) / len(v) for name, v in sorted(components.items())},
    )
