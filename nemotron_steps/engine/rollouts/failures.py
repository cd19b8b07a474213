"""What becomes of a rollout whose environment breaks: a failure with a name, masked and reported, and nothing else.

What ends a run is a share of failures over a bound (engine/grpo/filters.py), and what no environment causes: the
policy's generator, and a judge that runs beside it.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from nemotron_steps.engine.reporting import Reporter
from nemotron_steps.engine.rollouts.data import PromptRow
from nemotron_steps.engine.types import Rollout
from nemotron_steps.environments.base import (
    ENVIRONMENT_LOST,
    GRADER_FAILED,
    REWARD_OUT_OF_RANGE,
    VERDICT_INVALID,
    VERIFY_FAILED,
    AgentRun,
    Environment,
    GradeResult,
    Session,
)
from nemotron_steps.environments.judged.judges import JudgeLostError
from nemotron_steps.errors import RESUME, WorkerLostError
from nemotron_steps.waiting import waiting

PROMPT_TOO_LONG = "prompt_too_long"
"""Failure class: the prompt leaves no room for an answer."""
PROMPT_UNUSABLE = "prompt_unusable"
"""Failure class: the row cannot be read as a chat, or the chat template refuses it."""
RELEASE_FAILED = "release_failed"
"""What a session that could not be released is reported as. The rollout stays as it is."""

CALLS: dict[str, tuple[str, tuple[type, ...]]] = {
    "seed": ("seed_failed", (Session,)),
    "call_tool": ("call_tool_failed", (str,)),
    "follow_up": ("follow_up_failed", (str, type(None))),
    "judge_group": (VERIFY_FAILED, (list,)),
    "run_agent": ("run_agent_failed", (AgentRun,)),
    "release": (RELEASE_FAILED, (object,)),
}
"""By an environment's method: failure class of an exception that it raises, and what it returns otherwise."""

BROKEN = frozenset({*(name for name, _ in CALLS.values()), ENVIRONMENT_LOST, VERDICT_INVALID, REWARD_OUT_OF_RANGE})
"""Failure classes that say that an environment, or a row for it, is broken."""

REPORTED = 20
"""Groups of one environment and failure class that are reported in full; metrics count all of them."""

Answer = TypeVar("Answer")


class RolloutFailedError(Exception):
    """An environment broke on a rollout. Internal to the collector, which masks the rollout."""

    def __init__(self, verdict: GradeResult) -> None:
        super().__init__(verdict.failure)
        self.verdict = verdict


def told_of(verdict: GradeResult) -> dict[str, str]:
    """What a verdict says of its failure, as `Rollout.metadata` has it; the hint is a command that shows it again."""
    said = {name: verdict.details.get(name) for name in ("message", "traceback", "hint")}
    return {name: str(text) for name, text in said.items() if text}


async def ask(environment: Environment, call: str, answer: Awaitable[Answer]) -> Answer:
    """What a method of an environment answers."""
    name, kinds = CALLS[call]
    try:
        result = await call_with_timeout(environment.name, call, answer)
    except JudgeLostError:
        raise
    except Exception as error:
        raise RolloutFailedError(GradeResult.of_error(error, name)) from error
    if not isinstance(result, kinds):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        said = f"`{call}` of environment `{environment.name}` returned {result!r:.200}, expected {wanted}"
        raise RolloutFailedError(GradeResult.failed(name, message=said))
    return result


class FailureReports:
    """Tells a reporter of failed rollouts, once for a group and failure class, with row and traceback."""

    def __init__(self, reporter: Reporter | None) -> None:
        self._reporter = reporter
        self._reported: Counter[tuple[str, str]] = Counter()

    def report(self, prompt: PromptRow, group_id: str, rollouts: Sequence[Rollout]) -> None:
        """The failures of a group."""
        named = [(r.failure or (GRADER_FAILED if GRADER_FAILED in r.components else None), r) for r in rollouts]
        for name in dict.fromkeys(name for name, _ in named if name is not None):
            failed = [rollout for each, rollout in named if each == name]
            said = next((r.metadata for r in failed if r.metadata.get("message")), {})
            verdict = GradeResult.failed(name, **{key: said.get(key) for key in ("message", "traceback", "hint")})
            self.tell(prompt, group_id, failed[0].environment, verdict, len(failed))

    def tell(self, prompt: PromptRow, group_id: str, environment: str, verdict: GradeResult, rollouts: int) -> None:
        """One event `rollout_failed`."""
        kind = (environment, verdict.failure or "")
        self._reported[kind] += 1
        if self._reporter is None or self._reported[kind] > REPORTED:
            return
        self._reporter.event(
            "rollout_failed",
            environment=environment,
            failure=verdict.failure,
            where=prompt.where,
            group=group_id,
            rollouts=rollouts,
            **told_of(verdict),
        )


def failed_rollout(
    group_id: str, index: int, environment: str, verdict: GradeResult, *, truncated: bool = False
) -> Rollout:
    """A rollout with nothing to train: masked out and counted as failed."""
    return Rollout(
        group_id,
        index,
        [0],
        [0],
        [0.0],
        [],
        float("nan"),
        environment,
        truncated,
        failure=verdict.failure,
        metadata=dict(told_of(verdict)),
    )


ENVIRONMENT_SECONDS = 3600.0
"""For one call: seeding, a tool, a follow-up question, the verdict of a group."""
AGENT_SECONDS = 6 * 3600.0
"""For a whole rollout that an environment's own agent runs."""


async def call_with_timeout(name: str, call: str, answer: Awaitable[Answer]) -> Answer:
    """What an environment answers."""
    limit = AGENT_SECONDS if call == "run_agent" else ENVIRONMENT_SECONDS
    try:
        async with asyncio.timeout(limit) as clock:
            with waiting(f"the environment `{name}` ({call})", limit):
                return await answer
    except TimeoutError as error:
        if not clock.expired():  # the environment's own
            raise
        raise WorkerLostError(
            f"the environment `{name}` has not answered for {limit:.0f} s: it, or a judge it asks, is dead",
            where=f"{name}.{call}",
            hints=[RESUME],
        ) from error
