"""Rollouts: sample a prompt's group, run its tools, have the environment judge it.

One coroutine a group, one a rollout; they share the policy's generator through an AsyncSampler, so groups are judged
while others still decode. Not for: what a reward is worth (grpo/advantages.py) or the training loop (grpo/loop.py).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nemotron_steps.engine.generation.sampler import AsyncSampler
from nemotron_steps.engine.reporting import Reporter
from nemotron_steps.engine.rollouts.conversation import (
    DEFAULT_FORMAT,
    FORMAT_KEY,
    TurnFormat,
    parse_assistant,
)
from nemotron_steps.engine.rollouts.data import PromptRow
from nemotron_steps.engine.rollouts.failures import (
    PROMPT_TOO_LONG,
    PROMPT_UNUSABLE,
    Failure,
    FailureReports,
    RolloutFailedError,
    ask,
    failed_rollout,
)
from nemotron_steps.engine.rollouts.turns import (
    BROKEN_TOKENS,
    BrokenTokensError,
    Trajectory,
    Voice,
    response_of,
    trajectory_of,
)
from nemotron_steps.engine.types import Rollout, RolloutGroup, SamplingParams
from nemotron_steps.environments.base import (
    GRADER_FAILED,
    Environment,
    GradeResult,
    InvalidVerdictError,
    Row,
    Session,
)
from nemotron_steps.environments.environment_set import EnvironmentSet
from nemotron_steps.environments.judged.judge_transcripts import JUDGE_NOTES, notes_from
from nemotron_steps.environments.responses import Response
from nemotron_steps.errors import DataError
from nemotron_steps.models.chat import ChatFormat
from nemotron_steps.rows.layouts import read_request


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
        reporter: is told of failed rollouts.
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
        reporter: Reporter | None = None,
    ) -> None:
        self._sampler = sampler
        self._chat = chat
        self._environments = environments
        self.params = params
        self.max_total_length = max_total_length
        self._max_turns = max_turns
        self._plain = Voice.of(sampler, chat, turn_format, max_turns)
        self._voices: dict[str, Voice] = {}
        self._reports = FailureReports(reporter)

    def environment_of(self, prompt: PromptRow) -> Environment:
        """The environment that judges a prompt."""
        return self._environments.route(prompt.row, prompt.where)

    def environment_named(self, name: str) -> Environment:
        """An environment by name."""
        return self._environments.get(name)

    def shown(self, rollout: Rollout, *, whole: bool = True) -> dict[str, str]:
        """`prompt` as the policy saw it, and `response`: its turns.

        Args:
            whole: with the special tokens, which begin and end turns.
        """
        first_sampled = rollout.turns[0][0] if rollout.turns else len(rollout.token_ids)
        said = (self._chat.decode(rollout.token_ids[start:end], whole=whole) for start, end in rollout.turns)
        return {
            "prompt": self._chat.decode(rollout.token_ids[:first_sampled], whole=whole),
            "response": "\n".join(said),
        }

    async def collect(
        self,
        prompts: Sequence[PromptRow],
        *,
        group_ids: Sequence[str],
        num_generations: int,
        environment: Environment | None = None,
        params: SamplingParams | None = None,
        cuts: Sequence[asyncio.Event] | None = None,
    ) -> list[RolloutGroup]:
        """Groups of all prompts, in order.

        Args:
            group_ids: one a prompt, unique within a run; they also seed the sampling.
            num_generations: G.
            environment: judge with this one instead of each row's own.
            params: sample with these instead.
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
        cut: asyncio.Event | None = None,
    ) -> RolloutGroup:
        """Sample and judge one prompt's group. A rollout on which the environment breaks is a failed one of it.

        Raises:
            StragglerError: it was cut before two rollouts had finished.
            JudgeLostError: its judge, which runs beside the policy, is dead.
        """
        environment = environment or self._environments.route(prompt.row, prompt.where)
        version = self._sampler.generator.weight_version
        if environment.runs_agent:
            return await self._collect_agents(
                prompt, environment, group_id, num_generations, params or self.params, cut, version
            )
        voice = self._plain
        sessions: dict[int, Session] = {}
        verdicts: dict[int, GradeResult] = {}
        trajectories: dict[int, Trajectory] = {}
        responses: dict[int, Response] = {}
        try:
            seeding = (self._seed(environment, prompt.row, i, sessions, verdicts) for i in range(num_generations))
            await asyncio.gather(*seeding)
            if sessions:
                try:
                    voice = self._voice(prompt, environment)
                except DataError as error:
                    failure = Failure.of(GradeResult.of_error(error, PROMPT_UNUSABLE))
                    return self._unsampled(prompt, group_id, environment, num_generations, failure, version)
                prompt_ids = self._prompt_ids(prompt, voice, sessions[min(sessions)].tools)
                if isinstance(prompt_ids, Failure):
                    return self._unsampled(prompt, group_id, environment, num_generations, prompt_ids, version)
                trajectories = await self._sample(
                    prompt.row, environment, voice, sessions, prompt_ids, params or self.params, group_id, cut
                )
                responses = {i: response_of(trajectory, voice.chat) for i, trajectory in trajectories.items()}
                verdicts |= {i: t.failure.verdict for i, t in trajectories.items() if t.failure is not None}
                judging = self._judge(
                    prompt.row, environment, {i: r for i, r in responses.items() if i not in verdicts}, sessions
                )
                verdicts |= await _verdicts(judging, cut, group_id)
        finally:
            self._sampler.cancel(f"{group_id}/")  # of rollouts that were cut or cancelled
            for session in sessions.values():
                await self._release(prompt, group_id, environment, session)
        rollouts = [
            self._rollout(group_id, i, environment.name, trajectories[i], responses[i], v, voice)
            if i in trajectories
            else failed_rollout(group_id, i, environment.name, Failure.of(v))
            for i, v in sorted(verdicts.items())
        ]
        return self._group(prompt, group_id, rollouts, version)

    async def _seed(
        self,
        environment: Environment,
        row: Row,
        index: int,
        sessions: dict[int, Session],
        failed: dict[int, GradeResult],
    ) -> None:
        """Open a member's session, into `sessions` or else `failed`."""
        try:
            sessions[index] = await ask(environment, "seed", environment.seed(row))
        except RolloutFailedError as error:
            failed[index] = error.failure.verdict

    async def _sample(
        self,
        row: Row,
        environment: Environment,
        voice: Voice,
        sessions: Mapping[int, Session],
        prompt_ids: list[int],
        params: SamplingParams,
        group_id: str,
        cut: asyncio.Event | None,
    ) -> dict[int, Trajectory]:
        """The rollouts that got to their end, or to where their environment broke, before the cut."""
        room = self.max_total_length - len(prompt_ids)
        first = self._sampler.submit(
            prompt_ids,
            replace(params, max_new_tokens=min(params.max_new_tokens, room)),
            len(sessions),
            f"{group_id}/0",
        )
        running = {
            i: asyncio.ensure_future(
                voice.turns.run(
                    row, environment, session, prompt_ids, params, turn, f"{group_id}/{i}", self.max_total_length
                )
            )
            for (i, session), turn in zip(sorted(sessions.items()), first, strict=True)
        }
        await _until_done_or_cut([*running.values()], cut)
        finished = {i: task.result() for i, task in running.items() if task.done()}
        if len(finished) < len(running):
            for task in running.values():
                task.cancel()
            if len(finished) < min(2, len(running)):
                raise StragglerError(group_id)
        return finished

    def _voice(self, prompt: PromptRow, environment: Environment) -> Voice:
        """How the policy is asked by this row and its agent."""
        changed = {**environment.config.chat_template_kwargs, **read_request(prompt.row, prompt.where).template_kwargs}
        if not changed:
            return self._plain
        key = json.dumps(changed, sort_keys=True, default=str)
        if key not in self._voices:
            chat = self._chat.with_template_kwargs(changed, prompt.where)
            self._voices[key] = Voice.of(self._sampler, chat, self._plain.turn_format.under(chat), self._max_turns)
        return self._voices[key]

    def _prompt_ids(self, prompt: PromptRow, voice: Voice, tools: Sequence[dict[str, Any]]) -> list[int] | Failure:
        """The prompt's tokens, or why there is none with room for an answer."""
        try:
            ids = voice.chat.render(read_request(prompt.row, prompt.where).messages, tools)
        except Exception as error:  # templates raise whatever they stumble over in a row
            return Failure.of(GradeResult.of_error(error, PROMPT_UNUSABLE))
        if len(ids) >= self.max_total_length:
            return Failure(PROMPT_TOO_LONG, f"{len(ids)} tokens, of {self.max_total_length} with the answer")
        return ids

    async def _judge(
        self,
        row: Row,
        environment: Environment,
        responses: Mapping[int, Response],
        sessions: Mapping[int, Session],
    ) -> dict[int, GradeResult]:
        """The verdicts of rollouts that got to their end."""
        if not responses:
            return {}
        judging = environment.judge_group(row, list(responses.values()), [sessions[i] for i in responses])
        try:
            verdicts = await ask(environment, "judge_group", judging)
        except RolloutFailedError as error:
            verdicts = [error.failure.verdict] * len(responses)
        return dict(zip(responses, verdicts, strict=True))

    async def _release(self, prompt: PromptRow, group_id: str, environment: Environment, session: Session) -> None:
        try:
            await ask(environment, "release", environment.release(session))
        except RolloutFailedError as error:
            self._reports.tell(prompt, group_id, environment.name, error.failure, 1)

    def _unsampled(
        self,
        prompt: PromptRow,
        group_id: str,
        environment: Environment,
        num_generations: int,
        failure: Failure,
        version: int,
    ) -> RolloutGroup:
        """A group whose prompt cannot be sampled from: every rollout is masked out and counted as failed."""
        too_long = failure.name == PROMPT_TOO_LONG
        rollouts = [
            failed_rollout(group_id, i, environment.name, failure, truncated=too_long) for i in range(num_generations)
        ]
        return self._group(prompt, group_id, rollouts, version)

    def _group(self, prompt: PromptRow, group_id: str, rollouts: list[Rollout], version: int) -> RolloutGroup:
        self._reports.report(prompt, group_id, rollouts)
        oldest = min((min(r.weight_versions) for r in rollouts if r.weight_versions), default=version)
        return RolloutGroup(group_id, prompt.index, rollouts, oldest)

    async def _collect_agents(
        self,
        prompt: PromptRow,
        environment: Environment,
        group_id: str,
        num_generations: int,
        params: SamplingParams,
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
        running = [
            asyncio.ensure_future(self._run_agent(environment, prompt.row, sampling, params, version))
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
            result = running[index].result()
            if isinstance(result, Failure):
                rollouts.append(failed_rollout(group_id, index, environment.name, result))
            else:
                trajectory, response, verdict = result
                trajectory.cut(self.max_total_length)
                rollouts.append(
                    self._rollout(group_id, index, environment.name, trajectory, response, verdict, self._plain)
                )
        return self._group(prompt, group_id, rollouts, version)

    async def _run_agent(
        self, environment: Environment, row: Row, sampling: dict[str, Any], params: SamplingParams, version: int
    ) -> tuple[Trajectory, Response, GradeResult] | Failure:
        """One rollout of an agent."""
        try:
            run = await ask(environment, "run_agent", environment.run_agent(row, sampling))
            verdict = environment.checked("run_agent", run.verdict)
        except RolloutFailedError as error:
            return error.failure
        except InvalidVerdictError as error:
            return Failure.of(GradeResult.of_error(error))
        if verdict.failure is not None:
            return Failure.of(verdict)
        try:
            trajectory = trajectory_of(run, self._chat, version, params)
            response = response_of(trajectory, self._chat)
        except BrokenTokensError as error:
            return Failure(BROKEN_TOKENS, str(error))
        except (TypeError, ValueError, KeyError, AttributeError) as error:  # whatever a server sent
            return Failure(BROKEN_TOKENS, f"malformed output items: {error!r}")
        trajectory.malformed_tool_calls = sum(
            len(parse_assistant(text, turn_format=self._plain.turn_format).malformed_tool_calls)
            for text in trajectory.texts
        )
        return trajectory, response, verdict

    def _rollout(
        self,
        group_id: str,
        index: int,
        environment: str,
        trajectory: Trajectory,
        response: Response,
        verdict: GradeResult,
        voice: Voice,
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
                FORMAT_KEY: [voice.turn_format.reasoning_parser, voice.turn_format.tool_parser],
                **(Failure.of(verdict).metadata if verdict.failure or GRADER_FAILED in verdict.components else {}),
                **({JUDGE_NOTES: notes} if (notes := notes_from(verdict.details)) else {}),
            },
            routed_experts=trajectory.routed_experts,
        )


async def _verdicts(
    judging: Coroutine[Any, Any, dict[int, GradeResult]], cut: asyncio.Event | None, group_id: str
) -> dict[int, GradeResult]:
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
