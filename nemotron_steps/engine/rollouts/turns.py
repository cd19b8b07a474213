"""The turns of one rollout: what the policy says, and what the environment says to it.

The conversation goes on in tokens (models/chat.py): what was sampled stays as it was. Not for: groups and verdicts
(collector.py), or rollouts that an agent runs (agent_rollouts.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from nemotron_steps.engine.generation.sampler import AsyncSampler
from nemotron_steps.engine.rollouts.conversation import AssistantTurn, TurnFormat, parse_assistant
from nemotron_steps.engine.rollouts.failures import PROMPT_UNUSABLE, Failure, RolloutFailedError, ask
from nemotron_steps.engine.rollouts.trajectory import Trajectory
from nemotron_steps.engine.types import Completion, SamplingParams
from nemotron_steps.environments.base import Environment, GradeResult, Row, Session
from nemotron_steps.environments.responses import Response, ToolCall, function_call_output_item
from nemotron_steps.models.chat import ChatFormat


class Turns:
    """Runs rollouts turn by turn.

    Args:
        sampler: the policy's generator.
        chat: the policy's tokenizer and template.
        turn_format: how the policy writes reasoning and tool calls.
        max_turns: assistant turns a rollout may take, where its environment's `max_steps` does not say.
    """

    def __init__(self, sampler: AsyncSampler, chat: ChatFormat, turn_format: TurnFormat, max_turns: int) -> None:
        self._sampler = sampler
        self._chat = chat
        self._turn_format = turn_format
        self._max_turns = max_turns

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
        """One rollout, from its first sample to its end, or to where its environment broke (Trajectory.failure).

        Args:
            first: the first turn, being sampled.
            member_id: names its further requests and its calls.
        """
        trajectory = Trajectory(list(prompt_ids), [0] * len(prompt_ids), [0.0] * len(prompt_ids))
        completion = await first
        most = environment.config.max_steps or self._max_turns
        for turn in range(most):
            trajectory.append_sampled(completion)
            text = self._chat.decode(completion.token_ids)
            trajectory.texts.append(text)
            said = parse_assistant(text, f"{member_id}/{turn}", self._turn_format, session.tools)
            trajectory.output.extend(said.output_items())
            trajectory.malformed_tool_calls += len(said.malformed_tool_calls)
            if trajectory.truncated or turn + 1 == most:
                break
            ended = completion.token_ids[-1] in (*self._chat.end_ids, *params.stop_token_ids)
            try:
                new = await self._react(row, environment, session, said, trajectory)
                if not new:
                    break
            except RolloutFailedError as error:
                trajectory.failure = error.failure
                break
            try:
                trajectory.append_context(self._chat.render_continuation(new, session.tools, turn_ended=ended))
            except Exception as error:  # as in _prompt_ids
                trajectory.failure = Failure.of(GradeResult.of_error(error, PROMPT_UNUSABLE))
                break
            room = max_total_length - len(trajectory.token_ids)
            if room < 1:
                trajectory.truncated = True
                break
            completion = await self._sampler.sample(
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
        if said.tool_calls:
            return await self._call_tools(environment, session, said.tool_calls, trajectory)
        asking = environment.follow_up(row, response_of(trajectory, self._chat), session)
        question = await ask(environment, "follow_up", asking)
        if question is None:
            return []
        trajectory.output.append({"type": "message", "role": "user", "content": question})
        return [{"role": "user", "content": question}]

    @staticmethod
    async def _call_tools(
        environment: Environment, session: Session, calls: Sequence[ToolCall], trajectory: Trajectory
    ) -> list[dict[str, Any]]:
        """The results as chat messages; the trajectory's output gets them as items."""
        results = []
        for call in calls:
            arguments = call.parsed_arguments()
            if arguments is None:
                result = f"error: the arguments of `{call.name}` are not a JSON object"
            else:
                result = await ask(environment, "call_tool", environment.call_tool(session, call.name, arguments))
            results.append({"role": "tool", "name": call.name, "tool_call_id": call.call_id, "content": result})
            trajectory.output.append(function_call_output_item(call.call_id, result))
        return results


@dataclass(frozen=True)
class Voice:
    """How the policy is asked and read: its chat template with the variables of a row, and what follows from them."""

    chat: ChatFormat
    turn_format: TurnFormat
    turns: Turns

    @classmethod
    def of(cls, sampler: AsyncSampler, chat: ChatFormat, turn_format: TurnFormat, max_turns: int) -> Voice:
        """With Turns of its own."""
        return cls(chat, turn_format, Turns(sampler, chat, turn_format, max_turns))


def response_of(trajectory: Trajectory, chat: ChatFormat) -> Response:
    """What a rollout has said so far, as its environment sees it."""
    response = Response.from_output(trajectory.output, truncated=trajectory.truncated)
    response.num_reasoning_tokens = chat.count_tokens(response.reasoning)
    # Encoding long answers again costs as much as judging them; what is not reasoning is answer.
    start, end = trajectory.turns[-1]
    response.num_answer_tokens = max(0, end - start - response.num_reasoning_tokens)
    return response
