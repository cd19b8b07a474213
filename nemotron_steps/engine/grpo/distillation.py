"""On-policy distillation in the loop: which teacher each row has, and what the teachers say of a step's batch.

    sample_groups:  choose.mark(prompts, groups)      each rollout remembers its prompt's teacher
    train_on:       score(prepared)                   teachers' logprobs into the batch, before the policy trains

Everything else is the loop's: rewards are graded and logged, and do not train.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from nemotron_steps.engine.grpo.step import PreparedBatch
from nemotron_steps.engine.losses.loss import loss_mask
from nemotron_steps.engine.losses.ratios import kl_divergence
from nemotron_steps.engine.rollouts.teacher_choice import TeacherChoice
from nemotron_steps.engine.types import RolloutGroup, Teachers

if TYPE_CHECKING:
    from nemotron_steps.engine.rollouts.data import PromptRow

METADATA_KEY = "teacher"
"""Of a rollout: the name of its prompt's teacher."""


@dataclass(frozen=True)
class Distillation:
    """The teachers of a run and the rows that each of them has."""

    choice: TeacherChoice
    teachers: Teachers
    gives_advantages: bool = False
    """Whether the policy learns from sampled tokens' logprobs (adv_estimator.name=opd), not from distributions."""

    def mark(self, prompts: Sequence[PromptRow], groups: Sequence[RolloutGroup]) -> None:
        """Note each prompt's teacher in its rollouts, where a checkpoint of the buffer keeps it."""
        for prompt, group in zip(prompts, groups, strict=True):
            teacher = self.choice.of(prompt.row, prompt.where)
            for rollout in group.rollouts:
                rollout.metadata[METADATA_KEY] = teacher

    def score(self, prepared: PreparedBatch) -> None:
        """Have the teachers score the batch."""
        rollouts = prepared.rollouts
        prepared.batch = batch = self.teachers.score(prepared.batch, [r.metadata.get(METADATA_KEY) for r in rollouts])
        assert batch.teacher_logprobs is not None
        mask = loss_mask(batch.token_mask, batch.sample_mask)
        kl = kl_divergence(batch.generation_logprobs, batch.teacher_logprobs, "k1", input_clamp=None, output_clamp=None)
        kl = torch.where(mask > 0, kl, torch.zeros_like(kl))  # elsewhere it may be anything, NaN included
        totals = kl.sum(dim=1).tolist(), mask.sum(dim=1).tolist()
        sums: Mapping[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for rollout, nats, tokens in zip(rollouts, *totals, strict=True):
            if tokens:
                for key in ("mean", rollout.environment):
                    sums[key][0] += nats
                    sums[key][1] += tokens
        found: dict[str, Any] = {f"teacher_kl/{name}": nats / tokens for name, (nats, tokens) in sorted(sums.items())}
        if self.gives_advantages and "teacher_kl/mean" in found:  # else the loss computes it
            found["teacher_divergence"] = found["teacher_kl/mean"]
        prepared.metrics.update(found)

    def own_metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """A step's metrics without those of rewards' advantages, which nothing is trained on: a group of equal rewards,
        say, still teaches something."""
        left_out = ("groups/",) if self.gives_advantages else ("advantages/", "groups/")
        return {name: value for name, value in metrics.items() if not name.startswith(left_out)}
