"""The environments in an actor, so that grading is off the driver's event loop, and judges in actors.

Rows are checked and routed in the driver, by environments that are never started; what takes time runs in the actor.
One that dies takes the rollouts with it that it was grading, and so ends the run, which a resume goes on with.
"""

# ruff: noqa: D102  Environment and Judge say what each method does

import hashlib
import itertools
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from nemotron_steps.config.schema.rl import VllmModelConfig
from nemotron_steps.engine.workers.workers import (
    SILENT_SECONDS,
    START_SECONDS,
    Worker,
    WorkerProcess,
    answer,
    result_of,
    start_workers,
    stop_workers,
)
from nemotron_steps.environments.base import (
    AgentRun,
    Environment,
    EnvironmentConfig,
    GradeResult,
    Response,
    Row,
    Session,
)
from nemotron_steps.environments.environment_set import EnvironmentSet
from nemotron_steps.environments.judged.judges import HttpJudge, Judge, JudgeLostError, Messages
from nemotron_steps.errors import JudgeUnavailableError, WorkerLostError
from nemotron_steps.waiting import waiting

_LOG = logging.getLogger(__name__)


class JudgeWorker(WorkerProcess):
    """One copy of a GeneratorJudge. Which copy answers a question follows from the question, so that a resumed run is
    judged as an unbroken one."""

    async def build(self, role: str, config: VllmModelConfig, seed: int) -> None:
        """Load the model; arguments as setup.backends' build_judge."""
        from nemotron_steps.engine.setup.backends import GeneratorJudge, build_judge

        judge = build_judge(role, config, defer_to=None, seed=seed)
        assert isinstance(judge, GeneratorJudge), "judges behind HTTP have a place of their own"
        self._judge = judge

    async def start_step(self, step: str) -> None:
        """See GeneratorJudge.start_step."""
        self._judge.start_step(step)

    async def complete(
        self, messages: Sequence[dict[str, Any]], temperature: float, top_p: float, max_tokens: int
    ) -> str:
        return await self._judge.complete(messages, temperature=temperature, top_p=top_p, max_tokens=max_tokens)


@dataclass(frozen=True)
class PlacedJudge:
    """A `Judge` whose model lives in actors, a copy in each; may be handed to other actors. A worker's death ends the
    run: no rollout is graded without its judge."""

    workers: tuple[Worker, ...]

    async def complete(self, messages: Messages, *, temperature: float, top_p: float, max_tokens: int) -> str:
        worker = self.workers[copy_for(messages, len(self.workers))]
        try:
            call = worker.call("complete", list(messages), temperature, top_p, max_tokens)
            return str(await answer(call, worker))
        except WorkerLostError as error:
            raise JudgeLostError.of(error) from error

    def start_step(self, step: str) -> None:
        """See GeneratorJudge.start_step."""
        calls = [worker.call("start_step", step) for worker in self.workers]
        for call, worker in zip(calls, self.workers, strict=True):
            result_of(call, worker, timeout_s=SILENT_SECONDS)


def copy_for(messages: Messages, copies: int) -> int:
    """Which of a judge's copies answers a question: the same whenever it is asked."""
    if copies == 1:
        return 0
    text = json.dumps(messages, sort_keys=True)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) % copies


def start_judge(role: str, config: VllmModelConfig, options: Sequence[Mapping[str, Any]], *, seed: int) -> PlacedJudge:
    """Start a judge, a copy for each of `options`, and wait until all are ready."""
    import ray

    names = [f"judge {role}"] if len(options) == 1 else [f"judge {role} {number}" for number in range(len(options))]
    workers = start_workers(JudgeWorker, names, options)
    try:
        loading = [worker.call("build", role, config, seed) for worker in workers]
        deadline = time.monotonic() + config.readiness_timeout_s
        for call, worker in zip(loading, workers, strict=True):
            with waiting(f"{worker.name} to load its model", config.readiness_timeout_s):
                ready, _ = ray.wait([call], timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise JudgeUnavailableError(
                    f"the judge {role} did not become ready",
                    where=f"env.nemo_gym.{role}.responses_api_models.vllm_model",
                    expected=f"a loaded model within readiness_timeout_s={config.readiness_timeout_s:g}",
                    found="still loading",
                    hints=[f"tail -n 50 {worker.log}   # what it is doing"],
                )
            result_of(call, worker)
    except BaseException:
        stop_workers(workers)
        raise
    return PlacedJudge(tuple(workers))


Judges = Mapping[str, "Judge | partial[Judge]"]
"""By role; a judge behind HTTP is built in the process that asks it: connections do not travel."""


@dataclass(frozen=True)
class Place:
    """The state of a session that lives in the actor."""

    number: int


class EnvironmentWorker(WorkerProcess):
    """See the module docstring. Every method may overlap with others."""

    def __init__(self, judges: Judges) -> None:
        self._judges = {role: judge() if isinstance(judge, partial) else judge for role, judge in judges.items()}
        self._environments: dict[str, Environment] = {}
        self._sessions: dict[int, Session] = {}
        self._numbers = itertools.count()

    async def add(self, name: str, environment: type[Environment], config: EnvironmentConfig) -> None:
        """Create an environment."""
        self._environments[name] = environment(config, self._judges)

    async def start(self) -> None:
        """Start every environment created so far."""
        for environment in self._environments.values():
            await environment.start()

    async def close(self) -> None:
        """Close every environment created so far."""
        for environment in self._environments.values():
            await environment.close()

    async def seed(self, name: str, row: Row) -> Session:
        """A new session, as the driver has it."""
        session = await self._environments[name].seed(row)
        number = next(self._numbers)
        self._sessions[number] = session
        return Session(tools=session.tools, state=Place(number))

    async def ask(self, name: str, method: str, *arguments: Any) -> Any:
        """What a method of an environment answers."""
        found = [[*map(self._here, given)] if isinstance(given, list) else self._here(given) for given in arguments]
        return await getattr(self._environments[name], method)(*found)

    def _here(self, given: Any) -> Any:
        lives_here = isinstance(given, Session) and isinstance(given.state, Place)
        return self._sessions[given.state.number] if lives_here else given

    async def start_step(self, step: str) -> None:
        """Tell the judges behind HTTP, which live here, the training step."""
        for judge in self._judges.values():
            if isinstance(judge, HttpJudge):
                judge.start_step(step)

    async def release(self, name: str, number: int) -> None:
        await self._environments[name].release(self._sessions.pop(number))


class PlacedEnvironment(Environment):
    """The driver's side of an environment; `local` is its twin here, `label` the worker's name for it."""

    def __init__(self, local: Environment, worker: Worker, label: str) -> None:
        super().__init__(local.config, {})
        self.name = local.name  # type: ignore[misc]
        self.judges_groups = local.judges_groups  # type: ignore[misc]
        self.runs_agent = local.runs_agent  # type: ignore[misc]
        self.reward_range, self.usual_range = local.reward_range, local.usual_range
        self._local, self._worker, self._label = local, worker, label
        # Sessions that hold nothing need no actor, and there are as many as rollouts.
        kind = type(local)
        self._stateless = kind.seed is Environment.seed and kind.release is Environment.release

    async def seed(self, row: Row) -> Session:
        if self._stateless:
            return await self._local.seed(row)
        session: Session = await self._ask("seed", row)
        return session

    async def call_tool(self, session: Session, name: str, arguments: dict[str, Any]) -> str:
        output: str = await self._ask("ask", "call_tool", session, name, arguments)
        return output

    async def follow_up(self, row: Row, response: Response, session: Session) -> str | None:
        if type(self._local).follow_up is Environment.follow_up:
            return None
        question: str | None = await self._ask("ask", "follow_up", row, response, session)
        return question

    async def run_agent(self, row: Row, sampling: dict[str, Any]) -> AgentRun:
        """See Environment. It only talks to a server, and the policy's endpoint is on the driver's machine."""
        return await self._local.run_agent(row, sampling)

    async def verify(self, row: Row, response: Response, session: Session) -> GradeResult:
        return (await self.verify_group(row, [response], [session]))[0]

    async def verify_group(
        self, row: Row, responses: Sequence[Response], sessions: Sequence[Session]
    ) -> list[GradeResult]:
        verdicts: list[GradeResult] = await self._ask("ask", "judge_group", row, list(responses), list(sessions))
        return verdicts

    async def release(self, session: Session) -> None:
        if not self._stateless:
            await self._ask("release", session.state.number)

    async def _ask(self, method: str, *arguments: Any) -> Any:
        return await answer(self._worker.call(method, self._label, *arguments), self._worker)


class PlacedEnvironmentSet(EnvironmentSet):
    """An EnvironmentSet whose environments work in an actor; the training loop's judges behind HTTP live there too."""

    def __init__(
        self,
        options: Mapping[str, Mapping[str, Any]],
        judges: Mapping[str, Judge],
        worker: Worker,
        *,
        only: str | None = None,
    ) -> None:
        super().__init__(options, judges, only=only)
        self.worker = worker
        self._placed: dict[int, PlacedEnvironment] = {}

    def get(self, name: str) -> Environment:
        local = super().get(name)
        if id(local) not in self._placed:
            label = f"{local.name} {len(self._placed)}"
            adding = self.worker.call("add", label, type(local), local.config)
            result_of(adding, self.worker, timeout_s=START_SECONDS)
            self._placed[id(local)] = PlacedEnvironment(local, self.worker, label)
        return self._placed[id(local)]

    async def start(self) -> None:
        await answer(self.worker.call("start"), self.worker)

    def start_step(self, step: str) -> None:
        """Name the training step that the following questions of judges behind HTTP belong to."""
        result_of(self.worker.call("start_step", step), self.worker, timeout_s=SILENT_SECONDS)

    async def close(self) -> None:
        """See EnvironmentSet. What runs agents does so here, and is closed here as well."""
        for environment in self._environments.values():
            if environment.runs_agent:
                await environment.close()
        try:
            await answer(self.worker.call("close"), self.worker)
        except WorkerLostError as error:  # nothing of it is left to close
            _LOG.warning("%s", error.what)
