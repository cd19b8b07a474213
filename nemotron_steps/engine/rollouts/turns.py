"""The turns of one rollout: what the policy says, what the environment says to it, and what becomes of it where that
breaks: a failure with a name, masked and reported, and nothing else.

The conversation goes on in tokens (models/chat.py): what was sampled stays as it was. The tokens of an agent's rollout
are on its output items. Not for: groups and verdicts (collector.py).
"""

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from nemotron_steps.engine.generation.sampler import AsyncSampler
from nemotron_steps.engine.reporting import Reporter
from nemotron_steps.engine.rollouts.conversation import AssistantTurn, TurnFormat, parse_assistant
from nemotron_steps.engine.rollouts.data import PromptRow
from nemotron_steps.engine.types import Completion, FinishReason, Rollout, SamplingParams
from nemotron_steps.environments.base import (
    ENVIRONMENT_LOST,
    GRADER_FAILED,
    REWARD_OUT_OF_RANGE,
    VERDICT_INVALID,
    VERIFY_FAILED,
    AgentRun,
    Environment,
    GradeResult,
    Row,
    Session,
)
from nemotron_steps.environments.judged.judges import JudgeLostError
from nemotron_steps.environments.responses import Response, function_call_output_item
from nemotron_steps.errors import RESUME, WorkerLostError
from nemotron_steps.models.chat import ChatFormat
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
        named: dict[str, list[Rollout]] = {}
        for rollout in rollouts:
            name = rollout.failure or (GRADER_FAILED if GRADER_FAILED in rollout.components else None)
            if name is not None:
                named.setdefault(name, []).append(rollout)
        for name, failed in named.items():
            said = next((r.metadata for r in failed if r.metadata.get("message")), {})
            verdict = GradeResult.failed(name, **{key: said.get(key) for key in ("message", "traceback", "hint")})
            self.tell(prompt, group_id, failed[0].environment, verdict, len(failed))

    def tell(self, prompt: PromptRow, group_id: str, environment: str, verdict: GradeResult, rollouts: int) -> None:
        """One event `rollout_failed`."""
        kind = (environment, verdict.failure or "")
        self._reported[kind] += 1
        if self._reporter is not None and self._reported[kind] <= REPORTED:
            named = {"environment": environment, "failure": verdict.failure, "where": prompt.where, "group": group_id}
            self._reporter.event("rollout_failed", **named, rollouts=rollouts, **told_of(verdict))


def failed_rollout(
    group_id: str, index: int, environment: str, verdict: GradeResult, *, truncated: bool = False
) -> Rollout:
    """A rollout with nothing to train: masked out and counted as failed."""
    nothing = Rollout(group_id, index, [0], [0], [0.0], [], math.nan, environment, truncated, failure=verdict.failure)
    nothing.metadata.update(told_of(verdict))
    return nothing


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


@dataclass
class Trajectory:
    """One rollout's tokens so far, and what it said."""

    token_ids: list[int]
    token_mask: list[int]
    logprobs: list[float]
    weight_versions: list[int] = field(default_factory=list)
    turns: list[tuple[int, int]] = field(default_factory=list)
    output: list[dict[str, Any]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    truncated: bool = False
    malformed_tool_calls: int = 0
    failure: GradeResult | None = None
    """Why it did not get to its end."""
    routed_experts: npt.NDArray[np.int16] | None = None
    """As a Rollout's."""

    def append_sampled(self, completion: Completion) -> None:
        """Add an assistant turn as it was sampled."""
        start = len(self.token_ids)
        self.token_ids.extend(completion.token_ids)
        self.token_mask.extend([1] * len(completion.token_ids))
        self.logprobs.extend(completion.logprobs)
        self.weight_versions.extend(completion.weight_versions)
        self.turns.append((start, len(self.token_ids)))
        self.truncated = completion.finish_reason is not FinishReason.STOP
        chosen, known = completion.routed_experts, self.routed_experts
        if chosen is not None:
            # Of tokens that had none: a turn feeds the turns before it again, under other weights perhaps. Copied: what
            # came from another process lies in shared memory, which is not to be held for long.
            self.routed_experts = chosen.copy() if known is None else np.concatenate((known, chosen[len(known) :]))

    def append_context(self, token_ids: Sequence[int]) -> None:
        """Add tokens the policy did not write (tool results); they are never trained."""
        self.token_ids.extend(token_ids)
        self.token_mask.extend([0] * len(token_ids))
        self.logprobs.extend([0.0] * len(token_ids))

    def cut(self, limit: int) -> None:
        """Drop what lies past `limit` tokens: nothing after it is trained."""
        if len(self.token_ids) > limit:
            self.truncated = True
        for column in (self.token_ids, self.token_mask, self.logprobs):
            del column[limit:]  # type: ignore[attr-defined]
        if self.routed_experts is not None:
            self.routed_experts = self.routed_experts[:limit]


@dataclass(frozen=True)
class ChatSettings:
    """How rollouts are asked and read: the chat template with a row's variables, and what follows from them."""

    sampler: AsyncSampler
    chat: ChatFormat
    turn_format: TurnFormat
    max_turns: int

    async def run(
        self,
        row: Row,
        environment: Environment,
        session: Session,
        prompt_ids: list[int],
        params: SamplingParams,
        first: asyncio.Future[Completion],
        member_id: str,
        max_total_length: int,
    ) -> Trajectory:
        """One rollout, from its first sample to its end, or to where its environment broke (Trajectory.failure)."""
        trajectory = Trajectory(list(prompt_ids), [0] * len(prompt_ids), [0.0] * len(prompt_ids))
        completion = await first
        most = environment.config.max_steps or self.max_turns
        for turn in range(most):
            trajectory.append_sampled(completion)
            text = self.chat.decode(completion.token_ids)
            trajectory.texts.append(text)
            said = parse_assistant(text, f"{member_id}/{turn}", self.turn_format, session.tools)
            trajectory.output.extend(said.output_items())
            trajectory.malformed_tool_calls += len(said.malformed_tool_calls)
            if trajectory.truncated or turn + 1 == most:
                break
            ended = completion.token_ids[-1] in (*self.chat.end_ids, *params.stop_token_ids)
            try:
                new = await self._react(row, environment, session, said, trajectory)
                if not new:
                    break
            except RolloutFailedError as error:
                trajectory.failure = error.verdict
                break
            try:
                trajectory.append_context(self.chat.render_continuation(new, session.tools, turn_ended=ended))
            except Exception as error:  # as in _prompt_ids
                trajectory.failure = GradeResult.of_error(error, PROMPT_UNUSABLE)
                break
            room = max_total_length - len(trajectory.token_ids)
            if room < 1:
                trajectory.truncated = True
                break
            completion = await self.sampler.sample(
                trajectory.token_ids,
                replace(params, max_new_tokens=min(params.max_new_tokens, room)),
                f"{member_id}/{turn + 1}",
            )
        trajectory.cut(max_total_length)
        return trajectory

    async def _react(
        self, row: Row, environment: Environment, session: Session, said: AssistantTurn, trajectory: Trajectory
    ) -> list[dict[str, Any]]:
        """What the environment says to a turn: its calls' results, or another question; nothing ends the rollout."""
        results = []
        for call in said.tool_calls:
            arguments = call.parsed_arguments()
            if arguments is None:
                result = f"error: the arguments of `{call.name}` are not a JSON object"
            else:
                result = await ask(environment, "call_tool", environment.call_tool(session, call.name, arguments))
            results.append({"role": "tool", "name": call.name, "tool_call_id": call.call_id, "content": result})
            trajectory.output.append(function_call_output_item(call.call_id, result))
        if results:
            return results
        asking = environment.follow_up(row, response_of(trajectory, self.chat), session)
        question = await ask(environment, "follow_up", asking)
        if question is None:
            return []
        trajectory.output.append({"type": "message", "role": "user", "content": question})
        return [{"role": "user", "content": question}]


def response_of(trajectory: Trajectory, chat: ChatFormat) -> Response:
    """What a rollout has said so far, as its environment sees it."""
    response = Response.from_output(trajectory.output, truncated=trajectory.truncated)
    response.num_reasoning_tokens = chat.count_tokens(response.reasoning)
    # Encoding long answers again costs as much as judging them; what is not reasoning is answer.
    start, end = trajectory.turns[-1]
    response.num_answer_tokens = max(0, end - start - response.num_reasoning_tokens)
    return response


BROKEN_TOKENS = "agent_tokens_broken"
"""Failure class: the agent's output has no token fields, or its turns do not continue each other."""


class BrokenTokensError(ValueError):
    """The output cannot be trained on. Internal: the rollout is masked out as BROKEN_TOKENS."""


def trajectory_of(run: AgentRun, chat: ChatFormat, version: int, params: SamplingParams) -> Trajectory:
    """The tokens of an agent's rollout, which began under the weights `version`: BrokenTokensError if they are of older
    ones. A turn that does not say its version is of that one."""
    trajectory = Trajectory([], [], [], output=run.output)
    for item in run.output:
        if "generation_token_ids" not in item:
            continue
        prompt = _ids(item, "prompt_token_ids", chat)
        ids, logprobs = _ids(item, "generation_token_ids", chat), item.get("generation_log_probs")
        if not isinstance(logprobs, list) or len(logprobs) != len(ids):
            raise BrokenTokensError("generation_log_probs must have one number a token")
        for logprob in logprobs:  # rounding may leave a certain token a little above 0
            if not isinstance(logprob, int | float) or not math.isfinite(logprob) or logprob >= 1e-3:
                raise BrokenTokensError("generation_log_probs must be finite and at most 0")
        versions = item.get("generation_weight_versions", [version] * len(ids))
        if not isinstance(versions, list) or len(versions) != len(ids) or not all(type(v) is int for v in versions):
            raise BrokenTokensError("generation_weight_versions must have one number a token")
        if min(versions) < version:
            raise BrokenTokensError(f"a token is of version {min(versions)}, and the rollout began under {version}")
        known = len(trajectory.token_ids)
        if prompt[:known] != trajectory.token_ids:
            raise BrokenTokensError(f"turn {len(trajectory.turns)} does not continue the tokens before it")
        trajectory.append_context(prompt[known:])
        text = chat.decode(ids)
        ended = ids[-1] in (*chat.end_ids, *params.stop_token_ids) or any(stop in text for stop in params.stop_strings)
        reason = FinishReason.STOP if ended else FinishReason.LENGTH
        trajectory.append_sampled(Completion("", 0, ids, [float(value) for value in logprobs], reason, versions))
        trajectory.texts.append(text)
    if not trajectory.turns:
        raise BrokenTokensError("no output item has generation_token_ids")
    trajectory.truncated = trajectory.truncated or run.truncated
    return trajectory


def _ids(item: Mapping[str, Any], name: str, chat: ChatFormat) -> list[int]:
    ids = item.get(name)
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise BrokenTokensError(f"{name} must be a list of token ids")
    if min(ids) < 0 or max(ids) >= len(chat.tokenizer):
        raise BrokenTokensError(f"{name} holds a token that the policy's tokenizer lacks")
    return ids
