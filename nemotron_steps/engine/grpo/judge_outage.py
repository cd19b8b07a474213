"""Judges that do not answer: which groups are tried again, and when a run gives up.

A rollout without a verdict is masked, never a reward of 0. Where that leaves a group too few verdicts to tell whether
it has a signal, dynamic sampling tries its prompt again (MAX_FAILURES times at most). A run ends only when nothing is
answered any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nemotron_steps.engine.grpo.buffer import MAX_FAILURES
from nemotron_steps.engine.types import RolloutGroup
from nemotron_steps.environments.base import JUDGE_UNAVAILABLE
from nemotron_steps.environments.remote.remote import ENVIRONMENT_UNAVAILABLE
from nemotron_steps.errors import EngineError, JudgeUnavailableError, StepsError

NO_ANSWER = frozenset({JUDGE_UNAVAILABLE, ENVIRONMENT_UNAVAILABLE})
"""Failure classes that say nothing about the rollout: asked again, there may be a verdict."""


def is_ungraded(group: RolloutGroup) -> bool:
    """Whether too few rollouts have a verdict to compare them, because nobody answered."""
    failures = [rollout.failure for rollout in group.rollouts]
    return failures.count(None) < 2 and not NO_ANSWER.isdisjoint(failures)


def refuse_ungraded(groups: Sequence[RolloutGroup]) -> None:
    """A step in which nothing could be graded has nothing to learn from: stop, and say why.

    Raises:
        JudgeUnavailableError: a judge is the reason.
        EngineError: something else is.
    """
    failures = {rollout.failure for group in groups for rollout in group.rollouts}
    if None not in failures:
        raise _nothing_graded(failures, "the judge answered none of this step's questions")


class AnswerWatch:
    """Notices that judges have stopped answering, over the groups of one step as they come.

    Args:
        num_prompts: groups a step trains on. As many without any verdict are too many when none came before; after
            verdicts there have to be MAX_FAILURES times as many in a row.
    """

    def __init__(self, num_prompts: int) -> None:
        self.answered = False
        """Whether any rollout of the step has a verdict."""
        self._num_prompts = num_prompts
        self._silent: list[RolloutGroup] = []

    def saw(self, groups: Iterable[RolloutGroup]) -> None:
        """Groups came back.

        Raises:
            JudgeUnavailableError: too many in a row without a verdict.
            EngineError: likewise, and no judge is the reason.
        """
        for group in groups:
            failures = {rollout.failure for rollout in group.rollouts}
            if None in failures:
                self.answered = True
                self._silent = []
            elif not NO_ANSWER.isdisjoint(failures):
                self._silent.append(group)
            if not self.answered and len(self._silent) >= self._num_prompts:
                refuse_ungraded(self._silent)
            if len(self._silent) >= MAX_FAILURES * self._num_prompts:
                last = f"the judge has stopped answering: no verdict on any of the last {len(self._silent)} groups"
                raise _nothing_graded({r.failure for g in self._silent for r in g.rollouts}, last)


def _nothing_graded(failures: set[str | None], judge_says: str) -> StepsError:
    if JUDGE_UNAVAILABLE in failures:
        return JudgeUnavailableError(judge_says, hints=["steps doctor"])
    return EngineError(
        "no rollout of this step could be graded",
        found=", ".join(sorted(str(failure) for failure in failures)),
        hints=["steps doctor"],
    )
