"""Groups without verdicts: which are tried again, and when a run gives up.

A rollout without a verdict is masked, never a reward of 0. Where that leaves a group too few verdicts to compare, and
another attempt may bring some, its prompt is tried again (MAX_FAILURES times at most, then it is dropped). A run ends
when of the prompts it began together more than half of the rollouts broke their environments, or not one was graded:
one bad row, one broken grader among several, one dead environment do not end it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from nemotron_steps.engine.rollouts.data import PromptRow
from nemotron_steps.engine.rollouts.failures import BROKEN
from nemotron_steps.engine.types import Rollout, RolloutGroup
from nemotron_steps.environments.base import ENVIRONMENT_LOST, JUDGE_UNAVAILABLE
from nemotron_steps.environments.remote.remote import ENVIRONMENT_UNAVAILABLE
from nemotron_steps.errors import RESUME, EngineError, JudgeUnavailableError, StepsError, WorkerLostError, show_line

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
    """A step in which nothing was graded has nothing to learn from: stop, and say why.

    Raises:
        JudgeUnavailableError, WorkerLostError, EngineError: by what is the reason.
    """
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
    """Over all groups of a run, as they are begun and come back: what failed, and whether to go on.

    Prompts are judged with those that were begun beside them, not with those that came back: what fails comes back
    sooner.

    Args:
        num_prompts: groups a step trains on; so many prompts are judged together, MIN_PROMPTS at least.
        group_size: rollouts a prompt.
        num_rows: prompts there are.
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
        """A prompt's group came back.

        Args:
            number: from `began`.

        Raises:
            EngineError, WorkerLostError: too many rollouts broke their environments, or none was graded.
            JudgeUnavailableError: none was graded, and the judge is the reason.
        """
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
    return _error(EngineError, failures, what, failures[0].hint or shown)


def _broken(failures: Sequence[_Failed], what: str) -> StepsError:
    """What to say of environments that break, beginning with the one that breaks most."""
    by_environment: Counter[str] = Counter()
    for failed in failures:
        by_environment[failed.environment] += failed.count
    order = [environment for environment, _ in by_environment.most_common()]
    failures = sorted(failures, key=lambda failed: order.index(failed.environment))
    lost = all(failed.failure == ENVIRONMENT_LOST for failed in failures)
    mended = f"{RESUME}   # goes on from the last checkpoint, once it is mended"
    return _error(WorkerLostError if lost else EngineError, failures, what, mended)


def _error(kind: type[StepsError], failures: Sequence[_Failed], what: str, hint: str) -> StepsError:
    counts: Counter[str] = Counter()
    for failed in failures:
        counts[f"{failed.environment}: {failed.failure}"] += failed.count
    first = failures[0]
    found = ", ".join(f"{count} x {name}" for name, count in counts.most_common())
    return kind(
        what,
        where=f"environment `{first.environment}`" + (f", row {first.where}" if first.where else ""),
        found=found + (f"; the first:\n{first.said}" if first.said else ""),
        hints=[*show_line(first.where), hint],
    )
