"""Which groups a step trains on: those that have verdicts, and under dynamic sampling a signal; when a run gives up.

A rollout without a verdict is masked, never a reward of 0. Where that leaves a group too few verdicts to compare, and
another attempt may bring some, its prompt is tried again (MAX_FAILURES times at most, then it is dropped). A run ends
when of the prompts it began together more than half of the rollouts broke their environments, or not one was graded:
one bad row, one broken grader among several, one dead environment do not end it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from nemotron_steps.engine.grpo.advantages import ROUNDING
from nemotron_steps.engine.grpo.rewards import scale_rewards
from nemotron_steps.engine.rollouts.data import PromptRow
from nemotron_steps.engine.rollouts.failures import BROKEN
from nemotron_steps.engine.types import Rollout, RolloutGroup
from nemotron_steps.environments.base import ENVIRONMENT_LOST, JUDGE_UNAVAILABLE
from nemotron_steps.environments.remote.remote import ENVIRONMENT_UNAVAILABLE
from nemotron_steps.errors import RESUME, EngineError, JudgeUnavailableError, StepsError, WorkerLostError, show_line

if TYPE_CHECKING:
    from nemotron_steps.config.schema.grpo import RewardScalingConfig
    from nemotron_steps.engine.types import RolloutGroup


TRIED_AGAIN = BROKEN | {JUDGE_UNAVAILABLE, ENVIRONMENT_UNAVAILABLE}
"""Failure classes that another attempt may be without."""

MAX_BROKEN_SHARE = 0.5
"""Of the rollouts of prompts that were begun together."""
MIN_PROMPTS = 4
"""Prompts that are judged together at least: where a step has one, a bad row would otherwise be all of it."""


def is_ungraded(group: RolloutGroup) -> bool:
    """Whether too few rollouts have a verdict to compare them, and another attempt may have more."""
    failures = [rollout.failure for rollout in group.rollouts]
    return failures.count(None) < 2 and not TRIED_AGAIN.isdisjoint(failures)


def has_no_verdict(group: RolloutGroup) -> bool:
    """Whether nothing can be learned from a group."""
    return all(rollout.failure is not None for rollout in group.rollouts)


def refuse_ungraded(groups: Sequence[RolloutGroup]) -> None:
    """A step in which nothing was graded has nothing to learn from: stop, and say why."""
    if all(has_no_verdict(group) for group in groups):
        failures = [failure for group in groups for failure in _failures(group, "")]
        raise _nothing_graded(failures, "no rollout of this step could be graded")


@dataclass(frozen=True)
class _Failed:
    """Rollouts of one group that failed alike."""

    environment: str
    failure: str
    count: int
    where: str
    """file:line of the row; empty where it is not known."""
    said: str
    """Traceback or message of the first."""
    hint: str = ""
    """How to see it again, where its environment says."""


def _failures(group: RolloutGroup, where: str) -> list[_Failed]:
    first: dict[tuple[str, str], Rollout] = {}
    counts: Counter[tuple[str, str]] = Counter()
    for rollout in group.rollouts:
        if rollout.failure is not None:
            first.setdefault((rollout.environment, rollout.failure), rollout)
            counts[rollout.environment, rollout.failure] += 1
    failures = []
    for (environment, failure), count in counts.items():
        told = first[environment, failure].metadata
        said = told.get("traceback") or told.get("message") or ""
        failures.append(_Failed(environment, failure, count, where, said, told.get("hint") or ""))
    return failures


@dataclass
class _Together:
    """Prompts that were begun one after another, as many as are judged together."""

    failures: dict[int, list[_Failed]] = field(default_factory=dict)
    """Of the newest attempt at each prompt that came back, by its row."""
    answered: bool = False
    """Whether any attempt brought a verdict."""
    retried: set[int] = field(default_factory=set)
    """Prompts that are, or will be, tried again."""


class FailureWatch:
    """Over all groups of a run, as they are begun and come back: what failed, and whether to go on."""

    def __init__(self, num_prompts: int, group_size: int, num_rows: int) -> None:
        self._size = min(max(num_prompts, MIN_PROMPTS), num_rows)
        self._rollouts = self._size * group_size
        self._begun = 0
        self._together: dict[int, _Together] = {}
        self._retried: dict[int, int] = {}
        """With which prompts a row is judged whose last attempt was ungraded."""
        self._failed: Counter[tuple[str, str]] = Counter()
        self._judged: Counter[str] = Counter()

    def began(self, prompt: PromptRow) -> int:
        """A prompt is about to be sampled; returns what `saw` asks for."""
        number = self._retried.get(prompt.index)
        if number is None:
            number = self._begun // self._size
            self._begun += 1
        return number

    def saw(self, number: int, prompt: PromptRow, group: RolloutGroup) -> None:
        """A prompt's group came back."""
        failures = _failures(group, prompt.where)
        self._judged.update(rollout.environment for rollout in group.rollouts)
        for failed in failures:
            self._failed[failed.environment, failed.failure] += failed.count
        together = self._together.setdefault(number, _Together())
        together.failures[prompt.index] = failures
        together.answered |= not has_no_verdict(group)
        if is_ungraded(group):
            self._retried[prompt.index] = number
            together.retried.add(prompt.index)
        else:
            self._retried.pop(prompt.index, None)
            together.retried.discard(prompt.index)
        self._refuse(together)
        if len(together.failures) == self._size and not together.retried:
            del self._together[number]

    def metrics(self) -> dict[str, float]:
        """`failures/<environment>/<class>`: the share of the environment's rollouts since it was last asked."""
        shares = {
            f"failures/{environment}/{failure}": count / self._judged[environment]
            for (environment, failure), count in sorted(self._failed.items())
        }
        self._failed.clear()
        self._judged.clear()
        return shares

    def _refuse(self, together: _Together) -> None:
        failures = [failed for latest in together.failures.values() for failed in latest]
        broken = [failed for failed in failures if failed.failure in BROKEN]
        count = sum(failed.count for failed in broken)
        if count > MAX_BROKEN_SHARE * self._rollouts:
            raise _broken(broken, f"{count} of {self._rollouts} rollouts failed in their environments")
        if len(together.failures) == self._size and not together.answered:
            raise _nothing_graded(failures, f"no rollout of {self._size} prompts in a row could be graded")


def refuse_failures(prompts: Sequence[PromptRow], groups: Sequence[RolloutGroup], group_size: int) -> None:
    """What FailureWatch refuses, of prompts that are graded once, all together (an evaluation)."""
    watch = FailureWatch(len(prompts), group_size, len(prompts))
    for prompt, group in zip(prompts, groups, strict=True):
        watch.saw(watch.began(prompt), prompt, group)


def _nothing_graded(failures: Sequence[_Failed], what: str) -> StepsError:
    for failed in failures:
        if failed.failure == JUDGE_UNAVAILABLE:
            hints = [*([failed.hint] if failed.hint else []), "steps doctor"]
            return JudgeUnavailableError(f"the judge does not answer: {what}", found=failed.said or None, hints=hints)
    broken = [failed for failed in failures if failed.failure in BROKEN]
    if broken:
        return _broken(broken, what)
    shown = f"steps env show {failures[0].environment}   # its settings, and what its rows need"
    return EngineError(what, **_told(failures, failures[0].hint or shown))


def _broken(failures: Sequence[_Failed], what: str) -> StepsError:
    """What to say of environments that break, beginning with the one that breaks most."""
    by_environment: Counter[str] = Counter()
    for failed in failures:
        by_environment[failed.environment] += failed.count
    order = [environment for environment, _ in by_environment.most_common()]
    failures = sorted(failures, key=lambda failed: order.index(failed.environment))
    lost = all(failed.failure == ENVIRONMENT_LOST for failed in failures)
    mended = f"{RESUME}   # goes on from the last checkpoint, once it is mended"
    return (WorkerLostError if lost else EngineError)(what, **_told(failures, mended))


def _told(failures: Sequence[_Failed], hint: str) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    for failed in failures:
        counts[f"{failed.environment}: {failed.failure}"] += failed.count
    first = failures[0]
    found = ", ".join(f"{count} x {name}" for name, count in counts.most_common())
    return {
        "where": f"environment `{first.environment}`" + (f", row {first.where}" if first.where else ""),
        "found": found + (f"; the first:\n{first.said}" if first.said else ""),
        "hints": [*show_line(first.where), hint],
    }


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
    """Collects groups with a signal until `num_prompts` are there."""

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
        """Keep the groups that have a signal."""
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
    """What makes rewards differ within a group. To stop leaving equal groups out does not: they have no gradient."""
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
