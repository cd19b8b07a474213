"""The environments in an actor, so that grading is off the driver's event loop, and judges in actors.

Rows are checked and routed in the driver, by environments that are never started; what takes time runs in the actor.
One that dies is replaced, MAX_RESTARTS times in a run: sessions that it held are lost, and their rollouts with them.
"""

# ruff: noqa: D102  Environment and Judge say what each method does

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from nemotron_steps.config.schema.rl import VllmModelConfig
from nemotron_steps.engine.workers.workers import (
    PING_SECONDS,
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
MAX_RESTARTS = 20
"""Deaths of the environments' actor in a run, after which everything that is asked of it fails."""


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
    """The state of a session that lives in the actor, by a name that no session of another actor has."""

    name: str


class EnvironmentWorker(WorkerProcess):
    """See the module docstring. Every method may overlap with others."""

    def __init__(self, judges: Judges) -> None:
        self._judges = {role: judge() if isinstance(judge, partial) else judge for role, judge in judges.items()}
        self._environments: dict[str, Environment] = {}
        self._sessions: dict[str, Session] = {}

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
        place = Place(uuid.uuid4().hex)
        self._sessions[place.name] = session
        return Session(tools=session.tools, state=place)

    async def ask(self, name: str, method: str, *arguments: Any) -> Any:
        """What a method of an environment answers."""
        found = [[*map(self._here, given)] if isinstance(given, list) else self._here(given) for given in arguments]
        return await getattr(self._environments[name], method)(*found)

    def _here(self, given: Any) -> Any:
        if not isinstance(given, Session) or not isinstance(given.state, Place):
            return given
        if given.state.name not in self._sessions:
            raise WorkerLostError("a session is lost with the process that held it", where="the worker `environments`")
        return self._sessions[given.state.name]

    async def start_step(self, step: str) -> None:
        """Tell the judges behind HTTP, which live here, the training step."""
        for judge in self._judges.values():
            if isinstance(judge, HttpJudge):
                judge.start_step(step)

    async def release(self, name: str, place: Place) -> None:
        if place.name in self._sessions:
            await self._environments[name].release(self._sessions.pop(place.name))


class PlacedEnvironment(Environment):
    """The driver's side of an environment; `local` is its twin here, `label` the worker's name for it."""

    def __init__(self, local: Environment, home: PlacedEnvironmentSet, label: str) -> None:
        super().__init__(local.config, {})
        self.name = local.name  # type: ignore[misc]
        self.judges_groups = local.judges_groups  # type: ignore[misc]
        self.runs_agent = local.runs_agent  # type: ignore[misc]
        self.reward_range, self.usual_range = local.reward_range, local.usual_range
        self.local, self.label, self._home = local, label, home
        # Sessions that hold nothing need no actor, and there are as many as rollouts.
        kind = type(local)
        self._stateless = kind.seed is Environment.seed and kind.release is Environment.release

    async def seed(self, row: Row) -> Session:
        if self._stateless:
            return await self.local.seed(row)
        session: Session = await self._ask("seed", row)
        return session

    async def call_tool(self, session: Session, name: str, arguments: dict[str, Any]) -> str:
        output: str = await self._ask("ask", "call_tool", session, name, arguments)
        return output

    async def follow_up(self, row: Row, response: Response, session: Session) -> str | None:
        if type(self.local).follow_up is Environment.follow_up:
            return None
        question: str | None = await self._ask("ask", "follow_up", row, response, session)
        return question

    async def run_agent(self, row: Row, sampling: dict[str, Any]) -> AgentRun:
        """See Environment. It only talks to a server, and the policy's endpoint is on the driver's machine."""
        return await self.local.run_agent(row, sampling)

    async def verify(self, row: Row, response: Response, session: Session) -> GradeResult:
        return (await self.verify_group(row, [response], [session]))[0]

    async def verify_group(
        self, row: Row, responses: Sequence[Response], sessions: Sequence[Session]
    ) -> list[GradeResult]:
        verdicts: list[GradeResult] = await self._ask("ask", "judge_group", row, list(responses), list(sessions))
        return verdicts

    async def release(self, session: Session) -> None:
        if not self._stateless:
            await self._ask("release", session.state)

    async def _ask(self, method: str, *arguments: Any) -> Any:
        """What the actor answers; asked again if it dies."""
        for last in (False, True):
            worker = self._home.worker
            try:
                return await answer(worker.call(method, self.label, *arguments), worker)
            except JudgeLostError:
                raise
            except WorkerLostError:
                if last or not await self._home.replaced(worker):  # a loss inside the environment
                    raise
        raise AssertionError


class PlacedEnvironmentSet(EnvironmentSet):
    """An EnvironmentSet whose environments work in an actor; the training loop's judges behind HTTP live there too."""

    def __init__(
        self,
        options: Mapping[str, Mapping[str, Any]],
        judges: Mapping[str, Judge],
        start_worker: Callable[[], Worker],
        *,
        only: str | None = None,
    ) -> None:
        super().__init__(options, judges, only=only)
        self.restarts, self._start_worker, self._started = 0, start_worker, False
        self._step: str | None = None
        self._replacing: asyncio.Task[bool] | None = None
        self._placed: dict[int, PlacedEnvironment] = {}
        self.worker = start_worker()

    def get(self, name: str) -> Environment:
        local = super().get(name)
        if id(local) not in self._placed:
            label = f"{local.name} {len(self._placed)}"
            adding = self.worker.call("add", label, type(local), local.config)
            result_of(adding, self.worker, timeout_s=START_SECONDS)
            self._placed[id(local)] = PlacedEnvironment(local, self, label)
        return self._placed[id(local)]

    async def start(self) -> None:
        self._started = True
        await answer(self.worker.call("start"), self.worker)

    async def replaced(self, lost: Worker) -> bool:
        """See to it that another actor takes the place of a dead or silent one. False: it is well."""
        if self.worker is not lost:
            return True
        if self._replacing is None or self._replacing.done():  # whoever comes first does it, and the others wait
            self._replacing = asyncio.ensure_future(self._replace(lost))
        return await asyncio.shield(self._replacing)

    async def _replace(self, lost: Worker) -> bool:
        ping = asyncio.wrap_future(lost.beside("ping").future())
        done, _ = await asyncio.wait({ping}, timeout=PING_SECONDS)
        if done and ping.exception() is None:
            return False
        if self.restarts >= MAX_RESTARTS:
            raise lost.lost(f"it has died {self.restarts + 1} times")
        self.restarts += 1
        _LOG.warning("the worker `%s` is lost and replaced (%d of %d)", lost.name, self.restarts, MAX_RESTARTS)
        stop_workers([lost])
        worker = await asyncio.to_thread(self._start_worker)
        for placed in self._placed.values():
            await answer(worker.call("add", placed.label, type(placed.local), placed.local.config), worker)
        if self._started:
            await answer(worker.call("start"), worker)
        if self._step is not None:
            await answer(worker.call("start_step", self._step), worker)
        self.worker = worker
        return True

    def start_step(self, step: str) -> None:
        """Name the training step that the following questions of judges behind HTTP belong to."""
        self._step = step
        try:
            result_of(self.worker.call("start_step", step), self.worker, timeout_s=SILENT_SECONDS)
        except WorkerLostError as error:  # whoever asks it next replaces it, and tells the new one
            _LOG.warning("%s", error.what)

    async def close(self) -> None:
        """See EnvironmentSet. What runs agents does so here, and is closed here as well."""
        for environment in self._environments.values():
            if environment.runs_agent:
                await environment.close()
        try:
            await answer(self.worker.call("close"), self.worker)
        except WorkerLostError as error:  # nothing of it is left to close
            _LOG.warning("%s", error.what)
