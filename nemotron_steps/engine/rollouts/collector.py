"""Rollouts: sample a prompt's group, run its tools, have the environment judge it.

One coroutine a group, one a rollout; they share the policy's generator through an AsyncSampler, so groups are judged
while others still decode. Not for: what a reward is worth (grpo/advantages.py) or the training loop (grpo/loop.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from typing import Any

from nemotron_steps.engine.generation.sampler import AsyncSampler
from nemotron_steps.engine.rollouts.agent_rollouts import BROKEN_TOKENS, BrokenTokensError, agent_row, trajectory_of
from nemotron_steps.engine.rollouts.conversation import (
    DEFAULT_FORMAT,
    FORMAT_KEY,
    TurnFormat,
    messages_of,
    parse_assistant,
)
from nemotron_steps.engine.rollouts.data import PromptRow
from nemotron_steps.engine.rollouts.low_effort import METADATA_KEY as LOW_EFFORT_KEY
from nemotron_steps.engine.rollouts.low_effort import with_instruction
from nemotron_steps.engine.rollouts.timeouts import call_with_timeout
from nemotron_steps.engine.rollouts.trajectory import Trajectory
from nemotron_steps.engine.types import Completion, Rollout, RolloutGroup, SamplingParams
from nemotron_steps.environments.base import Environment, Row, Session, Verdict
from nemotron_steps.environments.environment_set import EnvironmentSet
from nemotron_steps.environments.responses import Response, ToolCall, function_call_output_item
from nemotron_steps.models.chat import ChatFormat

PROMPT_TOO_LONG = "prompt_too_long"
"""Failure class: the prompt leaves no room for an answer."""


class StragglerError(Exception):
    """A group was cut off before two of its rollouts had finished. Internal to the engine: the loop resamples it."""


class RolloutCollector:
    """Turns prompts into graded groups.

    Args:
        sampler: the policy's generator.
        chat: the policy's tokenizer and template.
        environments: finds a row's environment.
        params: how to sample; max_new_tokens is cut to what max_total_length leaves.
        max_total_length: prompt, answers and tool results together.
        max_turns: assistant turns a rollout may take.
        turn_format: how the policy writes reasoning and tool calls.
    """

    def __init__(
        self,
        sampler: AsyncSampler,
        chat: ChatFormat,
        environments: EnvironmentSet,
        params: SamplingParams,
        *,
        max_total_length: int,
        max_turns: int = 1,
        turn_format: TurnFormat = DEFAULT_FORMAT,
    ) -> None:
        self._sampler = sampler
        self._chat = chat
        self._environments = environments
        self._params = params
        self.max_total_length = max_total_length
        self._max_turns = max_turns
        self._turn_format = turn_format

    def environment_of(self, prompt: PromptRow) -> Environment:
        """The environment that judges a prompt."""
        return self._environments.route(prompt.row, prompt.where)

    def environment_named(self, name: str) -> Environment:
        """An environment by name."""
        return self._environments.get(name)

    def prompt_text(self, rollout: Rollout) -> str:
        """The prompt as the policy saw it."""
        first_sampled = rollout.turns[0][0] if rollout.turns else len(rollout.token_ids)
        return self._chat.decode(rollout.token_ids[:first_sampled])

    async def collect(
        self,
        prompts: Sequence[PromptRow],
        *,
        group_ids: Sequence[str],
        num_generations: int,
        environment: Environment | None = None,
        params: SamplingParams | None = None,
        suffixes: Sequence[str] | None = None,
        cuts: Sequence[asyncio.Event] | None = None,
    ) -> list[RolloutGroup]:
        """Groups of all prompts, in order.

        Args:
            group_ids: one a prompt, unique within a run; they also seed the sampling.
            num_generations: G.
            environment: judge with this one instead of each row's own.
            params: sample with these instead.
            suffixes: text appended to the last user message of each prompt (low-effort instruction).
            cuts: an event a prompt; setting it ends that group with the rollouts finished by then.
        """
        tasks = [
            asyncio.ensure_future(
                self.collect_group(
                    prompt,
                    group_id=group_ids[position],
                    num_generations=num_generations,
                    environment=environment,
                    params=params,
                    suffix=suffixes[position] if suffixes else "",
                    cut=cuts[position] if cuts else None,
                )
            )
            for position, prompt in enumerate(prompts)
        ]
        try:
            return list(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            raise

    async def collect_group(
        self,
        prompt: PromptRow,
        *,
        group_id: str,
        num_generations: int,
        environment: Environment | None = None,
        params: SamplingParams | None = None,
        suffix: str = "",
        cut: asyncio.Event | None = None,
    ) -> RolloutGroup:
        """Sample and judge one prompt's group.

        Raises:
            StragglerError: it was cut before two rollouts had finished.
        """
        environment = environment or self._environments.route(prompt.row, prompt.where)
        version = self._sampler.generator.weight_version
        if environment.runs_agent:
            return await self._collect_agents(
                prompt, environment, group_id, num_generations, params or self._params, suffix, cut, version
            )
        sessions: list[Session] = []
        try:
            for _ in range(num_generations):
                sessions.append(await call_with_timeout(environment.name, "seed", environment.seed(prompt.row)))
            messages = with_instruction(messages_of(prompt.row, prompt.where), suffix)
            prompt_ids = self._chat.render(messages, sessions[0].tools)
            room = self.max_total_length - len(prompt_ids)
            if room < 1:
                return _unsampled(prompt, group_id, num_generations, environment.name, version)
            params = params or self._params
            first = self._sampler.submit(
                prompt_ids,
                replace(params, max_new_tokens=min(params.max_new_tokens, room)),
                num_generations,
                f"{group_id}/0",
            )
            running = [
                asyncio.ensure_future(
                    self._run_member(
                        prompt.row, environment, sessions[i], prompt_ids, params, first[i], f"{group_id}/{i}"
                    )
                )
                for i in range(num_generations)
            ]
            await _until_done_or_cut(running, cut)
            finished = [i for i in range(num_generations) if running[i].done()]
            if len(finished) < num_generations:
                for task in running:
                    task.cancel()
                if len(finished) < min(2, num_generations):
                    raise StragglerError(group_id)
            trajectories = [running[i].result() for i in finished]
            responses = [self._response(t) for t in trajectories]
            judging = environment.judge_group(prompt.row, responses, [sessions[i] for i in finished])
            verdicts = await _verdicts(call_with_timeout(environment.name, "verify_group", judging), cut, group_id)
        finally:
            self._sampler.cancel(f"{group_id}/")  # of rollouts that were cut or cancelled
            for session in sessions:
                await call_with_timeout(environment.name, "release", environment.release(session))
        rollouts = [
            self._rollout(group_id, i, environment.name, t, r, v, suffix)
            for i, t, r, v in zip(finished, trajectories, responses, verdicts, strict=True)
        ]
        oldest = min((min(r.weight_versions) for r in rollouts if r.weight_versions), default=version)
        return RolloutGroup(group_id, prompt.index, rollouts, oldest)

    async def _run_member(
        self,
        row: Row,
        environment: Environment,
        session: Session,
        prompt_ids: list[int],
        params: SamplingParams,
        first: asyncio.Future[Completion],
        member_id: str,
    ) -> Trajectory:
        trajectory = Trajectory(list(prompt_ids), [0] * len(prompt_ids), [0.0] * len(prompt_ids))
        completion = await first
        for turn in range(self._max_turns):
            trajectory.append_sampled(completion)
            text = self._chat.decode(completion.token_ids)
            trajectory.texts.append(text)
            said = parse_assistant(text, f"{member_id}/{turn}", self._turn_format, session.tools)
            trajectory.output.extend(said.output_items())
            trajectory.malformed_tool_calls += len(said.malformed_tool_calls)
            if trajectory.truncated or turn + 1 == self._max_turns:
                break
            if not said.tool_calls:
                asking = environment.follow_up(row, self._response(trajectory), session)
                question = await call_with_timeout(environment.name, "follow_up", asking)
                if question is None:
                    break
                trajectory.output.append({"type": "message", "role": "user", "content": question})
                new: list[dict[str, Any]] = [{"role": "user", "content": question}]
            else:
                new = await self._call_tools(environment, session, said.tool_calls, trajectory)
            ended = completion.token_ids[-1] in (self._chat.eos_token_id, *params.stop_token_ids)
            trajectory.append_context(self._chat.render_continuation(new, session.tools, turn_ended=ended))
            room = self.max_total_length - len(trajectory.token_ids)
            if room < 1:
                trajectory.truncated = True
                break
            completion = await self._sampler.sample(
                trajectory.token_ids,
                replace(params, max_new_tokens=min(params.max_new_tokens, room)),
                f"{member_id}/{turn + 1}",
            )
        trajectory.cut(self.max_total_length)
        return trajectory

    async def _collect_agents(
        self,
        prompt: PromptRow,
        environment: Environment,
        group_id: str,
        num_generations: int,
        params: SamplingParams,
        suffix: str,
        cut: asyncio.Event | None,
        version: int,
    ) -> RolloutGroup:
        """A group whose rollouts are run by an agent that samples through the policy's endpoint."""
        self._sampler.bind()
        sampling = {
            "temperature": params.temperature,
            "top_p": params.top_p,
            "max_output_tokens": params.max_new_tokens,
        }
        row = agent_row(prompt.row, suffix)
        running = [
            asyncio.ensure_future(
                call_with_timeout(environment.name, "run_agent", environment.run_agent(row, sampling))
            )
            for _ in range(num_generations)
        ]
        await _until_done_or_cut(running, cut)
        finished = [i for i in range(num_generations) if running[i].done()]
        for task in running:
            task.cancel()
        if len(finished) < min(2, num_generations):
            raise StragglerError(group_id)
        rollouts = []
        for index in finished:
            run = running[index].result()
            if run.verdict.failure is not None:
                rollouts.append(_failed(group_id, index, environment.name, run.verdict.failure))
                continue
            try:
                trajectory = trajectory_of(run, self._chat, version, params)
            except BrokenTokensError as error:
                rollouts.append(_failed(group_id, index, environment.name, BROKEN_TOKENS, message=str(error)))
                continue
            trajectory.malformed_tool_calls = sum(
                len(parse_assistant(text, turn_format=self._turn_format).malformed_tool_calls)
                for text in trajectory.texts
            )
            response = self._response(trajectory)
            trajectory.cut(self.max_total_length)
            rollouts.append(self._rollout(group_id, index, environment.name, trajectory, response, run.verdict, suffix))
        oldest = min((min(r.weight_versions) for r in rollouts if r.weight_versions), default=version)
        return RolloutGroup(group_id, prompt.index, rollouts, oldest)

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
                calling = environment.call_tool(session, call.name, arguments)
                result = await call_with_timeout(environment.name, "call_tool", calling)
            results.append({"role": "tool", "name": call.name, "tool_call_id": call.call_id, "content": result})
            trajectory.output.append(function_call_output_item(call.call_id, result))
        return results

    def _response(self, trajectory: Trajectory) -> Response:
        response = Response.from_output(trajectory.output, truncated=trajectory.truncated)
        response.num_reasoning_tokens = self._chat.count_tokens(response.reasoning)
        # Encoding long answers again costs as much as judging them; what is not reasoning is answer.
        start, end = trajectory.turns[-1]
        response.num_answer_tokens = max(0, end - start - response.num_reasoning_tokens)
        return response

    def _rollout(
        self,
        group_id: str,
        index: int,
        environment: str,
        trajectory: Trajectory,
        response: Response,
        verdict: Verdict,
        suffix: str,
    ) -> Rollout:
        return Rollout(
            group_id=group_id,
            index=index,
            token_ids=trajectory.token_ids,
            token_mask=trajectory.token_mask,
            logprobs=trajectory.logprobs,
            weight_versions=trajectory.weight_versions,
            reward=verdict.reward if verdict.reward is not None else float("nan"),
            environment=environment,
            truncated=trajectory.truncated,
            components=dict(verdict.components),
            failure=verdict.failure,
            turns=trajectory.turns,
            metadata={
                "turn_texts": trajectory.texts,
                "answer": response.text,
                "answer_tokens": response.num_answer_tokens,
                "malformed_tool_calls": trajectory.malformed_tool_calls,
                LOW_EFFORT_KEY: bool(suffix),
                FORMAT_KEY: [self._turn_format.reasoning_parser, self._turn_format.tool_parser],
            },
        )


async def _verdicts(judging: Awaitable[list[Verdict]], cut: asyncio.Event | None, group_id: str) -> list[Verdict]:
    """The verdicts of a group; a cut while it is judged makes it a straggler.

    A group whose cut came before, while it was sampled, is judged in full: its rollouts are what the cut is to save.
    """
    task = asyncio.ensure_future(judging)
    await _until_done_or_cut([task], None if cut is None or cut.is_set() else cut)
    if not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=1.0)
        raise StragglerError(group_id)
    return task.result()


async def _until_done_or_cut(tasks: Sequence[asyncio.Future[Any]], cut: asyncio.Event | None) -> None:
    """Wait for every task, or for the cut. A task's exception is raised at once and cancels the others."""
    waiter = asyncio.ensure_future(cut.wait()) if cut is not None else None
    pending: set[asyncio.Future[Any]] = set(tasks)
    try:
        while pending:
            watched = pending | {waiter} if waiter is not None else pending
            done, _ = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {waiter}:
                task.result()
            pending -= done
            if waiter is not None and waiter.done():
                return
    except BaseException:
        for task in tasks:
            task.cancel()
        raise
    finally:
        if waiter is not None:
            waiter.cancel()


def _unsampled(prompt: PromptRow, group_id: str, num_generations: int, environment: str, version: int) -> RolloutGroup:
    """A group whose prompt does not fit: every rollout is masked out and counted as failed."""
    rollouts = [_failed(group_id, i, environment, PROMPT_TOO_LONG, truncated=True) for i in range(num_generations)]
    return RolloutGroup(group_id, prompt.index, rollouts, version)


def _failed(
    group_id: str, index: int, environment: str, failure: str, *, truncated: bool = False, message: str = ""
) -> Rollout:
    """A rollout with nothing to train: masked out and counted as failed."""
    metadata = {"message": message} if message else {}
    return Rollout(
        group_id, index, [0], [0], [0.0], [], float("nan"), environment, truncated, failure=failure, metadata=metadata
    )
