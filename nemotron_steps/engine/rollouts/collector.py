"""Rollouts: sample a prompt's group, run its tools, have the environment judge it.

One coroutine a group, one a rollout; they share the policy's generator through an AsyncSampler, so groups are judged
while others still decode. Not for: what a reward is worth (grpo/advantages.py) or the training loop (grpo/loop.py).
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from nemotron_steps.engine.generation.sampler import AsyncSampler
from nemotron_steps.engine.reporting import Reporter
from nemotron_steps.engine.rollouts.conversation import (
    DEFAULT_FORMAT,
    FORMAT_KEY,
    TurnFormat,
    parse_assistant,
)
from nemotron_steps.engine.rollouts.data import PromptRow
from nemotron_steps.engine.rollouts.turns import (
    BROKEN_TOKENS,
    PROMPT_TOO_LONG,
    PROMPT_UNUSABLE,
    BrokenTokensError,
    ChatSettings,
    FailureReports,
    RolloutFailedError,
    Trajectory,
    ask,
    failed_rollout,
    response_of,
    told_of,
    trajectory_of,
)
from nemotron_steps.engine.types import Rollout, RolloutGroup, SamplingParams, oldest_version
from nemotron_steps.environments.base import (
    GRADER_FAILED,
    Environment,
    GradeResult,
    InvalidVerdictError,
    Session,
)
from nemotron_steps.environments.environment_set import EnvironmentSet
from nemotron_steps.environments.judged.judge_transcripts import JUDGE_NOTES, notes_from
from nemotron_steps.environments.responses import Response
from nemotron_steps.models.chat import ChatFormat
from nemotron_steps.rows.layouts import read_request

STRAGGLED = "straggler"
"""Failure class: the rollout was not over by its group's deadline."""


@dataclass(frozen=True)
class _GroupRequest:
    """A prompt whose group is being collected."""

    prompt: PromptRow
    group_id: str
    num_generations: int
    environment: Environment
    params: SamplingParams
    ends: float | None
    """On the event loop's clock, where its rollouts have a deadline."""
    version: int
    """Of the weights when it began."""

    def failed(self, index: int, verdict: GradeResult) -> Rollout:
        """A member with nothing to train."""
        too_long = verdict.failure == PROMPT_TOO_LONG
        return failed_rollout(self.group_id, index, self.environment.name, verdict, truncated=too_long)


class RolloutCollector:
    """Turns prompts into graded groups."""

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
        self.environments = environments
        self.params = params
        self.max_total_length = max_total_length
        self._plain = ChatSettings(sampler, chat, turn_format, max_turns)
        self._settings: dict[str, ChatSettings] = {}
        self._reports = FailureReports(reporter)

    def environment_of(self, prompt: PromptRow) -> Environment:
        """The environment that judges a prompt."""
        return self.environments.route(prompt.row, prompt.where)

    def shown(self, rollout: Rollout, *, whole: bool = True) -> dict[str, str]:
        """`prompt` as the policy saw it, and `response`: its turns."""
        first_sampled = rollout.turns[0][0] if rollout.turns else len(rollout.token_ids)
        said = (self._chat.decode(rollout.token_ids[start:end], whole=whole) for start, end in rollout.turns)
        return {
            "prompt": self._chat.decode(rollout.token_ids[:first_sampled], whole=whole),
            "response": "\n".join(said),
        }

    async def collect(
        self, prompts: Sequence[PromptRow], *, group_ids: Sequence[str], **options: Any
    ) -> list[RolloutGroup]:
        """Groups of all prompts, in order; `options` as collect_group's."""
        collecting = (self.collect_group(p, group_id=g, **options) for p, g in zip(prompts, group_ids, strict=True))
        tasks = [asyncio.ensure_future(each) for each in collecting]
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
        deadline_s: float | None = None,
    ) -> RolloutGroup:
        """Sample and judge one prompt's group. A rollout on which the environment breaks, or that is not over after
        `deadline_s`, is a failed one of it."""
        environment = environment or self.environment_of(prompt)
        version = self._sampler.generator.weight_version
        ends = None if deadline_s is None else asyncio.get_running_loop().time() + deadline_s
        group = _GroupRequest(prompt, group_id, num_generations, environment, params or self.params, ends, version)
        late = GradeResult.failed(STRAGGLED)
        if environment.runs_agent:
            self._sampler.bind()
            agents = {i: asyncio.ensure_future(self._run_agent(group, i)) for i in range(num_generations)}
            finished = await _in_time(agents, group)
            return self._group(group, [finished.get(i) or group.failed(i, late) for i in range(num_generations)])
        settings = self._plain
        sessions: dict[int, Session] = {}
        verdicts: dict[int, GradeResult] = {}
        trajectories: dict[int, Trajectory] = {}
        responses: dict[int, Response] = {}
        try:
            await asyncio.gather(*(self._seed(group, i, sessions, verdicts) for i in range(num_generations)))
            if sessions:
                try:
                    settings, prompt_ids = self._prompt(group, sessions[min(sessions)].tools)
                except RolloutFailedError as error:
                    return self._group(group, [group.failed(i, error.verdict) for i in range(num_generations)])
                trajectories = await self._sample(group, settings, sessions, prompt_ids)
                responses = {i: response_of(trajectory, settings.chat) for i, trajectory in trajectories.items()}
                verdicts |= {i: late for i in sessions if i not in trajectories}
                verdicts |= {i: t.failure for i, t in trajectories.items() if t.failure is not None}
                judged = {i: response for i, response in responses.items() if i not in verdicts}
                work = asyncio.ensure_future(self._judge(group, judged, sessions))
                if ends is None or ends <= asyncio.get_running_loop().time():  # of a group that was cut, however long
                    verdicts |= await work
                else:
                    verdicts |= (await _in_time({0: work}, group)).get(0, dict.fromkeys(judged, late))
        finally:
            self._sampler.cancel(f"{group_id}/")  # of rollouts that were late or cancelled
            for session in sessions.values():
                try:
                    await ask(environment, "release", environment.release(session))
                except RolloutFailedError as error:
                    self._reports.tell(prompt, group_id, environment.name, error.verdict, 1)
        rollouts = [
            _rollout(group, i, trajectories[i], responses[i], v, settings.turn_format)
            if i in trajectories
            else group.failed(i, v)
            for i, v in sorted(verdicts.items())
        ]
        return self._group(group, rollouts)

    async def _seed(
        self, group: _GroupRequest, index: int, sessions: dict[int, Session], failed: dict[int, GradeResult]
    ) -> None:
        """Open a member's session, into `sessions` or else `failed`."""
        try:
            sessions[index] = await ask(group.environment, "seed", group.environment.seed(group.prompt.row))
        except RolloutFailedError as error:
            failed[index] = error.verdict

    async def _sample(
        self, group: _GroupRequest, settings: ChatSettings, sessions: Mapping[int, Session], prompt_ids: list[int]
    ) -> dict[int, Trajectory]:
        """The rollouts that got to their end, or to where their environment broke, before the deadline."""
        room = self.max_total_length - len(prompt_ids)
        first_params = replace(group.params, max_new_tokens=min(group.params.max_new_tokens, room))
        first = self._sampler.submit(prompt_ids, first_params, len(sessions), f"{group.group_id}/0")
        running = {
            i: asyncio.ensure_future(
                settings.run(
                    group.prompt.row,
                    group.environment,
                    session,
                    prompt_ids,
                    group.params,
                    turn,
                    f"{group.group_id}/{i}",
                    self.max_total_length,
                )
            )
            for (i, session), turn in zip(sorted(sessions.items()), first, strict=True)
        }
        return await _in_time(running, group)

    def _prompt(self, group: _GroupRequest, tools: Sequence[dict[str, Any]]) -> tuple[ChatSettings, list[int]]:
        """The prompt's tokens, under the template's variables of this row and its agent.

        RolloutFailedError: the row cannot be read or rendered, or leaves no room for an answer.
        """
        prompt, settings = group.prompt, self._plain
        try:
            request = read_request(prompt.row, prompt.where)
            changed = {**group.environment.config.chat_template_kwargs, **request.template_kwargs}
            if changed:
                key = json.dumps(changed, sort_keys=True, default=str)
                if key not in self._settings:
                    chat = self._chat.with_template_kwargs(changed, prompt.where)
                    turn_format = settings.turn_format.under(chat)
                    self._settings[key] = replace(settings, chat=chat, turn_format=turn_format)
                settings = self._settings[key]
            ids = settings.chat.render(request.messages, tools)
        except Exception as error:  # templates raise whatever they stumble over in a row
            raise RolloutFailedError(GradeResult.of_error(error, PROMPT_UNUSABLE)) from error
        if len(ids) >= self.max_total_length:
            told = f"{len(ids)} tokens, of {self.max_total_length} with the answer"
            raise RolloutFailedError(GradeResult.failed(PROMPT_TOO_LONG, message=told))
        return settings, ids

    async def _judge(
        self, group: _GroupRequest, responses: Mapping[int, Response], sessions: Mapping[int, Session]
    ) -> dict[int, GradeResult]:
        """The verdicts of rollouts that got to their end."""
        if not responses:
            return {}
        environment, opened = group.environment, [sessions[i] for i in responses]
        judging = environment.judge_group(group.prompt.row, list(responses.values()), opened)
        try:
            verdicts = await ask(environment, "judge_group", judging)
        except RolloutFailedError as error:
            verdicts = [error.verdict] * len(responses)
        return dict(zip(responses, verdicts, strict=True))

    def _group(self, group: _GroupRequest, rollouts: list[Rollout]) -> RolloutGroup:
        self._reports.report(group.prompt, group.group_id, rollouts)
        return RolloutGroup(group.group_id, group.prompt.index, rollouts, oldest_version(rollouts, group.version))

    async def _run_agent(self, group: _GroupRequest, index: int) -> Rollout:
        """One rollout of an agent."""
        environment, params = group.environment, group.params
        sampling = {
            "temperature": params.temperature,
            "top_p": params.top_p,
            "max_output_tokens": params.max_new_tokens,
        }
        try:
            run = await ask(environment, "run_agent", environment.run_agent(group.prompt.row, sampling))
            verdict = environment.checked("run_agent", run.verdict)
        except RolloutFailedError as error:
            return group.failed(index, error.verdict)
        except InvalidVerdictError as error:
            return group.failed(index, GradeResult.of_error(error))
        if verdict.failure is not None:
            return group.failed(index, verdict)
        try:
            trajectory = trajectory_of(run, self._chat, group.version, params)
            response = response_of(trajectory, self._chat)
        except BrokenTokensError as error:
            return group.failed(index, GradeResult.failed(BROKEN_TOKENS, message=str(error)))
        except (TypeError, ValueError, KeyError, AttributeError) as error:  # whatever a server sent
            said = f"malformed output items: {error!r}"
            return group.failed(index, GradeResult.failed(BROKEN_TOKENS, message=said))
        turn_format = self._plain.turn_format
        trajectory.malformed_tool_calls = sum(
            len(parse_assistant(text, turn_format=turn_format).malformed_tool_calls) for text in trajectory.texts
        )
        trajectory.cut(self.max_total_length)
        return _rollout(group, index, trajectory, response, verdict, turn_format)


def _rollout(
    group: _GroupRequest,
    index: int,
    trajectory: Trajectory,
    response: Response,
    verdict: GradeResult,
    turn_format: TurnFormat,
) -> Rollout:
    return Rollout(
        group_id=group.group_id,
        index=index,
        token_ids=trajectory.token_ids,
        token_mask=trajectory.token_mask,
        logprobs=trajectory.logprobs,
        weight_versions=trajectory.weight_versions,
        reward=verdict.reward if verdict.reward is not None else float("nan"),
        environment=group.environment.name,
        truncated=trajectory.truncated,
        components=dict(verdict.components),
        failure=verdict.failure,
        turns=trajectory.turns,
        metadata={
            "turn_texts": trajectory.texts,
            "answer": response.text,
            "answer_tokens": response.num_answer_tokens,
            "malformed_tool_calls": trajectory.malformed_tool_calls,
            FORMAT_KEY: [turn_format.reasoning_parser, turn_format.tool_parser],
            **(told_of(verdict) if verdict.failure or GRADER_FAILED in verdict.components else {}),
            **({JUDGE_NOTES: notes} if (notes := notes_from(verdict.details)) else {}),
        },
        routed_experts=trajectory.routed_experts,
    )


_Result = TypeVar("_Result")


async def _in_time(running: Mapping[int, asyncio.Future[_Result]], group: _GroupRequest) -> dict[int, _Result]:
    """What the members came to that finished before the deadline. An exception of one cancels the others."""
    left = None if group.ends is None else max(0.0, group.ends - asyncio.get_running_loop().time())
    try:
        done, _ = await asyncio.wait(running.values(), timeout=left, return_when=asyncio.FIRST_EXCEPTION)
        return {i: task.result() for i, task in running.items() if task in done}
    finally:
        for task in running.values():
            task.cancel()
