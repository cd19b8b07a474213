"""Which groups a step trains on: those that have verdicts, and under dynamic sampling a signal; when a run gives up.

A rollout without a verdict is masked, never a reward of 0; docs/broken_environments.md has the rules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from nemotron_steps.engine.grpo.advantages import ROUNDING
from nemotron_steps.engine.grpo.rewards import scale_rewards
from nemotron_steps.engine.rollouts.collector import STRAGGLED
from nemotron_steps.engine.rollouts.data import PromptRow
from nemotron_steps.engine.rollouts.turns import BROKEN
from nemotron_steps.engine.types import RolloutGroup
from nemotron_steps.environments.base import ENVIRONMENT_LOST, JUDGE_UNAVAILABLE
from nemotron_steps.environments.remote.remote import ENVIRONMENT_UNAVAILABLE
from nemotron_steps.errors import RESUME, EngineError, JudgeUnavailableError, StepsError, WorkerLostError, show_line

if TYPE_CHECKING:
    from nemotron_steps.config.schema.grpo import GrpoConfig

TRIED_AGAIN = BROKEN | {JUDGE_UNAVAILABLE, ENVIRONMENT_UNAVAILABLE, STRAGGLED}
"""Failure classes that another attempt may be without."""
MAX_BROKEN_SHARE = 0.5
"""Of the rollouts of prompts that were begun together."""
MIN_PROMPTS = 4
"""Prompts that are judged together at least: where a step has one, a bad row would otherwise be all of it."""


class Failed(NamedTuple):
    """A rollout without a verdict: what an error shows of it."""

    where: str
    """file:line of its row, empty where it is not known."""
    environment: str
    failure: str
    said: str | None
    hint: str | None

    @classmethod
    def of(cls, group: RolloutGroup, where: str = "") -> list[Failed]:
        """Those of a group."""
        failed = [(r, r.failure, r.metadata) for r in group.rollouts if r.failure is not None]
        return [
            cls(where, r.environment, failure, told.get("traceback") or told.get("message"), told.get("hint"))
            for r, failure, told in failed
        ]


def is_ungraded(group: RolloutGroup) -> bool:
    """Whether too few rollouts have a verdict to compare them, and another attempt may have more."""
    failures = failures_of(group)
    return failures.count(None) < 2 and not TRIED_AGAIN.isdisjoint(failures)


def has_no_verdict(group: RolloutGroup) -> bool:
    """Whether nothing can be learned from a group."""
    return None not in failures_of(group)


def failures_of(group: RolloutGroup) -> list[str | None]:
    """Why each rollout has no reward; None for those that have one."""
    return [rollout.failure for rollout in group.rollouts]


def refuse_ungraded(groups: Sequence[RolloutGroup]) -> None:
    """A step in which nothing was graded has nothing to learn from: stop, and say why."""
    if all(has_no_verdict(group) for group in groups):
        failed = [each for group in groups for each in Failed.of(group)]
        raise _nothing_graded(failed, "no rollout of this step could be graded")


@dataclass
class _Together:
    """Prompts that were begun one after another, as many as are judged together."""

    failed: dict[int, list[Failed]] = field(default_factory=dict)
    """Of the newest attempt at each prompt that came back, by its row."""
    answered: bool = False
    """Whether any attempt brought a verdict."""
    retried: set[int] = field(default_factory=set)
    """Prompts that are, or will be, tried again."""


class FailureWatch:
    """Over all groups of a run, as they are begun and come back: what failed, and whether to go on.

    Prompts are judged with those that were begun beside them, `num_prompts` together: what fails comes back sooner.
    """

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
        """A prompt's group came back; raises where too many rollouts broke their environments, or none was graded."""
        failed = Failed.of(group, prompt.where)
        self._judged.update(rollout.environment for rollout in group.rollouts)
        self._failed.update((each.environment, each.failure) for each in failed)
        together = self._together.setdefault(number, _Together())
        together.failed[prompt.index] = failed
        late = all(each.failure == STRAGGLED for each in failed)  # which is the deadline's doing, not the graders'
        together.answered |= late or not has_no_verdict(group)
        if is_ungraded(group):
            self._retried[prompt.index] = number
            together.retried.add(prompt.index)
        else:
            self._retried.pop(prompt.index, None)
            together.retried.discard(prompt.index)
        every = [each for latest in together.failed.values() for each in latest]
        broken = [each for each in every if each.failure in BROKEN]
        if len(broken) > MAX_BROKEN_SHARE * self._rollouts:
            raise _broken(broken, f"{len(broken)} of {self._rollouts} rollouts failed in their environments")
        if len(together.failed) < self._size:
            return
        if not together.answered:
            raise _nothing_graded(every, f"no rollout of {self._size} prompts in a row could be graded")
        if not together.retried:
            del self._together[number]

    def metrics(self) -> dict[str, float]:
        """Of all rollouts since it was last asked: `failure_rate` and `failures/<class>`, and of an environment's
        `failures/<environment>/<class>`."""
        total = self._judged.total()
        shares = {"failure_rate": self._failed.total() / total} if total else {}
        for (environment, failure), count in sorted(self._failed.items()):
            shares[f"failures/{failure}"] = shares.get(f"failures/{failure}", 0.0) + count / total
            shares[f"failures/{environment}/{failure}"] = count / self._judged[environment]
        self._failed.clear()
        self._judged.clear()
        return shares


def refuse_failures(prompts: Sequence[PromptRow], groups: Sequence[RolloutGroup], group_size: int) -> None:
    """What FailureWatch refuses, of prompts that are graded once, all together (an evaluation)."""
    watch = FailureWatch(len(prompts), group_size, len(prompts))
    for prompt, group in zip(prompts, groups, strict=True):
        watch.saw(watch.began(prompt), prompt, group)


def _nothing_graded(failed: Sequence[Failed], what: str) -> StepsError:
    unjudged = next((each for each in failed if each.failure == JUDGE_UNAVAILABLE), None)
    if unjudged is not None:
        hints = [*([unjudged.hint] if unjudged.hint else []), "steps doctor"]
        return JudgeUnavailableError(f"the judge does not answer: {what}", found=unjudged.said, hints=hints)
    broken = [each for each in failed if each.failure in BROKEN]
    if broken:
        return _broken(broken, what)
    if all(each.failure == STRAGGLED for each in failed):
        return EngineError(what, **_told(failed, "grpo.async_grpo.straggler_deadline_s=null"))
    shown = f"steps env show {failed[0].environment}   # its settings, and what its rows need"
    return EngineError(what, **_told(failed, failed[0].hint or shown))


def _broken(failed: Sequence[Failed], what: str) -> StepsError:
    """What to say of environments that break, beginning with the one that breaks most."""
    order = [environment for environment, _ in Counter(each.environment for each in failed).most_common()]
    failed = sorted(failed, key=lambda each: order.index(each.environment))
    lost = all(each.failure == ENVIRONMENT_LOST for each in failed)
    mended = f"{RESUME}   # goes on from the last checkpoint, once it is mended"
    return (WorkerLostError if lost else EngineError)(what, **_told(failed, mended))


def _told(failed: Sequence[Failed], hint: str) -> dict[str, Any]:
    counts = Counter(f"{each.environment}: {each.failure}" for each in failed)
    found = ", ".join(f"{count} x {name}" for name, count in counts.most_common())
    first = failed[0]
    return {
        "where": f"environment `{first.environment}`" + (f", row {first.where}" if first.where else ""),
        "found": found + (f"; the first:\n{first.said}" if first.said else ""),
        "hints": [*show_line(first.where), hint],
    }


def has_signal(group: RolloutGroup, config: GrpoConfig) -> bool:
    """Whether the scaled, unshaped rewards of a group's graded rollouts differ (std != 0), up to rounding."""
    graded = [rollout.reward for rollout in group.rollouts if rollout.failure is None]
    if len(graded) < 2:
        return False
    rewards = scale_rewards(torch.tensor(graded, dtype=torch.float64), config)
    low, high = float(rewards.min()), float(rewards.max())
    return high - low > ROUNDING * max(abs(low), abs(high))


@dataclass
class Judged:
    """Groups that were judged for one step, and what dynamic sampling leaves out of them."""

    offered: int = 0
    without_signal: int = 0
    ungraded: int = 0
    """Groups with too few verdicts to tell; not among those offered."""

    def metrics(self, batches: float, surplus: int) -> dict[str, float]:
        """Generation batches used, the share of graded groups that had no signal, groups with one that are too many,
        and groups that nobody graded."""
        return {
            "dynamic_sampling/batches": float(batches),
            "dynamic_sampling/discarded_share": self.without_signal / self.offered if self.offered else 0.0,
            "dynamic_sampling/surplus_groups": float(surplus),
            "dynamic_sampling/ungraded_groups": float(self.ungraded),
        }


class DynamicSampler(Judged):
    """Collects groups with a signal for one step: `offer` each generated batch, ask `complete`, then `take`.

    `grpo.dynamic_sampling_max_gen_batches` counts batches of `batch_size` groups.
    """

    def __init__(self, config: GrpoConfig, batch_size: int) -> None:
        super().__init__()
        self.config = config
        self.limit = config.dynamic_sampling_max_gen_batches * batch_size
        self.kept: list[RolloutGroup] = []
        """Groups with a signal; once taken, those that were too many: older weights would be off-policy."""
        self.batches = 0

    @property
    def complete(self) -> bool:
        """Whether a step's groups are there."""
        return len(self.kept) >= self.config.num_prompts_per_step

    def offer(self, groups: Sequence[RolloutGroup]) -> list[int]:
        """Keep the groups that have a signal. Returns the positions of those whose prompts are to be tried again."""
        self.batches += 1
        again = [position for position, group in enumerate(groups) if is_ungraded(group)]
        self.ungraded += len(again)
        self.offered += len(groups) - len(again)
        for position, group in enumerate(groups):
            if position not in again and has_signal(group, self.config):
                self.kept.append(group)
            else:
                self.without_signal += position not in again
        if not self.complete and self.offered >= self.limit:
            raise too_few_groups(len(self.kept), self.offered, self.config)
        return again

    def take(self) -> list[RolloutGroup]:
        """The step's groups, in the order they were generated."""
        needed = self.config.num_prompts_per_step
        taken, self.kept = self.kept[:needed], self.kept[needed:]
        return taken


def too_few_groups(kept: int, offered: int, config: GrpoConfig) -> EngineError:
    """What to say when `grpo.dynamic_sampling_max_gen_batches` batches did not fill a step."""
    needed, batches = config.num_prompts_per_step, config.dynamic_sampling_max_gen_batches
    some = (f"grpo.dynamic_sampling_max_gen_batches={2 * batches}", "grpo.use_dynamic_sampling=false")
    return EngineError(
        f"dynamic sampling found {kept} groups with differing rewards in {batches} batches",
        where="grpo.use_dynamic_sampling",
        expected=f"{needed} groups",
        found=f"{kept} of {offered} generated",
        hints=(*(some if kept else ()), *more_signal(config.num_generations_per_prompt)),
    )


def more_signal(generations: int) -> tuple[str, ...]:
    """What makes rewards differ within a group. To stop leaving equal groups out does not: they have no gradient."""
    return (
        f"grpo.num_generations_per_prompt={2 * generations}   # larger groups differ more often",
        "--input prompts=PATH   # easier prompts where all rewards are low, harder ones where all are high",
    )


def epsilon_filter(mean_rewards: torch.Tensor, *, epsilon: float, limit: float) -> torch.Tensor:
    """Which groups to train on when at most a share `limit` of them may be trivial, with a mean scaled reward [P]
    within `epsilon` of 0 or of 1: bool [P], True to keep. Of trivial groups the first are kept: batch order is the
    shuffled data order."""
    trivial = (mean_rewards <= epsilon) | (mean_rewards >= 1.0 - epsilon)
    allowed = int(limit * len(mean_rewards) + ROUNDING)
    rank = trivial.long().cumsum(0)
    return ~trivial | (rank <= allowed)
