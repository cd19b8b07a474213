"""Choosing which prompt groups a step trains on: dynamic sampling and epsilon filtering.

Dynamic sampling (DAPO, arXiv:2503.14476) keeps generating until the batch is full of groups whose rollouts differ in
reward, because a group that always or never succeeds has no gradient. Epsilon filtering lets at most an annealed share
of the batch be nearly solved or nearly hopeless.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from nemotron_steps.engine.grpo.advantages import ROUNDING
from nemotron_steps.engine.grpo.rewards import scale_rewards
from nemotron_steps.engine.grpo.ungraded import is_ungraded
from nemotron_steps.errors import EngineError

if TYPE_CHECKING:
    from nemotron_steps.config.schema.grpo import RewardScalingConfig
    from nemotron_steps.engine.types import RolloutGroup


def unshaped_rewards(group: RolloutGroup, scaling: RewardScalingConfig) -> torch.Tensor:
    """Scaled but unshaped rewards of a group's graded rollouts, float64 [rollouts]."""
    graded = [rollout.reward for rollout in group.rollouts if rollout.failure is None]
    return scale_rewards(torch.tensor(graded, dtype=torch.float64), scaling)


def failures_of(group: RolloutGroup) -> list[str | None]:
    """Why each rollout has no reward; None for those that have one."""
    return [rollout.failure for rollout in group.rollouts]


def has_signal(rewards: torch.Tensor) -> bool:
    """Whether the rewards of a group differ (std != 0), up to rounding."""
    if len(rewards) < 2:
        return False
    low, high = float(rewards.min()), float(rewards.max())
    return high - low > ROUNDING * max(abs(low), abs(high))


@dataclass
class DynamicSampler:
    """Collects groups with a signal until `num_prompts` are there.

    One object serves one training step: `offer` each generated batch of groups, ask `complete`, then `take`. Groups
    beyond the needed number stay in `kept` and go with it: weights older than the step's would be off-policy.

    Args:
        num_prompts: groups a step trains on.
        max_batches: `grpo.dynamic_sampling_max_gen_batches`.
        scaling: `grpo.reward_scaling`; the signal is looked for in the scaled, unshaped reward.
        batch_size: groups of a generation batch, by which max_batches counts; None: num_prompts.
    """

    num_prompts: int
    max_batches: int
    scaling: RewardScalingConfig
    batch_size: int | None = None
    kept: list[RolloutGroup] = field(default_factory=list)
    batches: int = 0
    offered: int = 0
    without_signal: int = 0
    ungraded: int = 0
    """Groups with too few verdicts to tell; not among those offered."""
    untrained: list[str | None] = field(default_factory=list)
    """Failure class, or None, of each rollout of the groups that are not kept; once taken, of the surplus as well."""

    @property
    def complete(self) -> bool:
        """Whether a step's groups are there."""
        return len(self.kept) >= self.num_prompts

    @property
    def missing(self) -> int:
        """Groups still needed."""
        return max(0, self.num_prompts - len(self.kept))

    def offer(self, groups: Sequence[RolloutGroup]) -> list[int]:
        """Keep the groups that have a signal.

        Returns:
            Positions of the groups whose prompts are to be tried again: nobody answered what they are worth.

        Raises:
            EngineError: the step is still not full after `max_batches` generation batches' worth of graded groups.
        """
        self.batches += 1
        again = [position for position, group in enumerate(groups) if is_ungraded(group)]
        self.ungraded += len(again)
        self.offered += len(groups) - len(again)
        for position, group in enumerate(groups):
            if position not in again and has_signal(unshaped_rewards(group, self.scaling)):
                self.kept.append(group)
            else:
                self.without_signal += position not in again
                self.untrained += failures_of(group)
        if not self.complete and self.offered >= self.max_batches * (self.batch_size or self.num_prompts):
            raise too_few_groups(
                len(self.kept), self.num_prompts, self.offered, self.max_batches, len(groups[0].rollouts)
            )
        return again

    def take(self) -> list[RolloutGroup]:
        """The step's groups, in the order they were generated; they leave `kept`."""
        if not self.complete:
            raise EngineError(f"{self.missing} groups are still missing", where="DynamicSampler.take")
        taken, self.kept = self.kept[: self.num_prompts], self.kept[self.num_prompts :]
        for group in self.kept:
            self.untrained += failures_of(group)
        return taken

    def metrics(self) -> dict[str, float]:
        """Generation batches used, the share of graded groups that had no signal, groups with one that are too many,
        and groups that nobody graded."""
        return {
            "dynamic_sampling/batches": float(self.batches),
            "dynamic_sampling/discarded_share": self.without_signal / self.offered if self.offered else 0.0,
            "dynamic_sampling/surplus_groups": float(max(0, self.offered - self.without_signal - self.num_prompts)),
            "dynamic_sampling/ungraded_groups": float(self.ungraded),
        }


def too_few_groups(kept: int, needed: int, offered: int, batches: int, generations: int) -> EngineError:
    """What to say when `grpo.dynamic_sampling_max_gen_batches` batches did not fill a step."""
    needs = -(-needed * batches // kept) if kept else 0
    some = (f"grpo.dynamic_sampling_max_gen_batches={needs + 1}", "grpo.use_dynamic_sampling=false")
    return EngineError(
        f"dynamic sampling found {kept} groups with differing rewards in {batches} batches",
        where="grpo.use_dynamic_sampling",
        expected=f"{needed} groups",
        found=f"{kept} of {offered} generated",
        hints=(*(some if kept else ()), *more_signal(generations)),
    )


def more_signal(generations: int) -> tuple[str, ...]:
    """What makes rewards differ within a group. To stop leaving equal groups out does not: they have no gradient.

    Args:
        generations: `grpo.num_generations_per_prompt`.
    """
    return (
        f"grpo.num_generations_per_prompt={2 * generations}   # larger groups differ more often",
        "--input prompts=PATH   # easier prompts where all rewards are low, harder ones where all are high",
    )


def epsilon_filter(mean_rewards: torch.Tensor, *, epsilon: float, limit: float) -> torch.Tensor:
    """Which groups to train on when at most a share `limit` of them may be trivial: nearly solved or nearly hopeless,
    mean scaled reward [P] within `epsilon` of 0 or of 1.

    The first floor(limit x P) trivial groups are kept, in batch order, and the later ones dropped: batch order is the
    shuffled data order, so the choice is random but reproducible.

    Returns:
        bool [P], True to keep.
    """
    trivial = (mean_rewards <= epsilon) | (mean_rewards >= 1.0 - epsilon)
    allowed = int(limit * len(mean_rewards) + ROUNDING)
    rank = trivial.long().cumsum(0)
    return ~trivial | (rank <= allowed)
