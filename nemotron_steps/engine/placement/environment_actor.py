"""The environments in an actor, so that grading is off the driver's event loop.

Rows are checked and routed in the driver, by environments that are created but never started; what takes time runs in
the actor. A session's state stays there. Not for: environments behind HTTP (environments/remote/remote.py), which may
be used from the actor as from anywhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemotron_steps.engine.placement.judge_actor import HttpJudgeRecipe, PlacedJudge
from nemotron_steps.engine.workers.workers import (
    SILENT_SECONDS,
    START_SECONDS,
    Worker,
    WorkerProcess,
    answer,
    result_of,
)
from nemotron_steps.environments.base import AgentRun, Environment, EnvironmentConfig, Response, Row, Session, Verdict
from nemotron_steps.environments.environment_set import EnvironmentSet
from nemotron_steps.environments.judged.judges import HttpJudge, Judge

Judges = Mapping[str, PlacedJudge | HttpJudgeRecipe]


class EnvironmentWorker(WorkerProcess):
    """See the module docstring. Every method may overlap with others."""

    def __init__(self, judges: Judges) -> None:
        self._judges: dict[str, Judge] = {
            role: judge.build() if isinstance(judge, HttpJudgeRecipe) else judge for role, judge in judges.items()
        }
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

    async def seed(self, name: str, row: Row) -> tuple[int, list[dict[str, Any]]]:
        """A new session: its number and tools."""
        session = await self._environments[name].seed(row)
        number = next(self._numbers)
        self._sessions[number] = session
        return number, session.tools

    async def call_tool(self, name: str, place: int | Session, tool: str, arguments: dict[str, Any]) -> str:
        """See Environment."""
        return await self._environments[name].call_tool(self._session(place), tool, arguments)

    async def follow_up(self, name: str, row: Row, response: Response, place: int | Session) -> str | None:
        """See Environment."""
        return await self._environments[name].follow_up(row, response, self._session(place))

    async def verify_group(
        self, name: str, row: Row, responses: Sequence[Response], places: Sequence[int | Session]
    ) -> list[Verdict]:
        """See Environment."""
        sessions = [self._session(place) for place in places]
        return await self._environments[name].verify_group(row, responses, sessions)

    async def start_step(self, step: str) -> None:
        """Tell the judges behind HTTP, which live here, the training step."""
        for judge in self._judges.values():
            if isinstance(judge, HttpJudge):
                judge.start_step(step)

    async def release(self, name: str, number: int) -> None:
        """See Environment."""
        await self._environments[name].release(self._sessions.pop(number))

    def _session(self, place: int | Session) -> Session:
        """The session of a number; one that has no state comes along itself."""
        return self._sessions[place] if isinstance(place, int) else place


class PlacedEnvironment(Environment):
    """The driver's side of an environment; `local` is its twin here, for what needs no work."""

    def __init__(self, local: Environment, worker: Worker) -> None:
        super().__init__(local.config, {})
        self.name = local.name  # type: ignore[misc]
        self.judges_groups = local.judges_groups  # type: ignore[misc]
        self.runs_agent = local.runs_agent  # type: ignore[misc]
        self.reward_range = local.reward_range
        self._local, self._worker = local, worker
        # Sessions that hold nothing need no actor, and there are as many as rollouts.
        kind = type(local)
        self._stateless = kind.seed is Environment.seed and kind.release is Environment.release

    def needed_judges(self) -> tuple[str, ...]:
        """See Environment."""
        return self._local.needed_judges()

    def check_row(self, row: Row, where: str) -> None:
        """See Environment."""
        self._local.check_row(row, where)

    async def seed(self, row: Row) -> Session:
        """See Environment; the state is the session's number in the actor."""
        if self._stateless:
            return await self._local.seed(row)
        number, tools = await self._ask("seed", row)
        return Session(tools=tools, state=number)

    async def call_tool(self, session: Session, name: str, arguments: dict[str, Any]) -> str:
        """See Environment."""
        output: str = await self._ask("call_tool", self._place(session), name, arguments)
        return output

    async def follow_up(self, row: Row, response: Response, session: Session) -> str | None:
        """See Environment."""
        if type(self._local).follow_up is Environment.follow_up:
            return None
        question: str | None = await self._ask("follow_up", row, response, self._place(session))
        return question

    async def run_agent(self, row: Row, sampling: dict[str, Any]) -> AgentRun:
        """See Environment. It only talks to a server, and the policy's endpoint is on the driver's machine."""
        return await self._local.run_agent(row, sampling)

    async def verify(self, row: Row, response: Response, session: Session) -> Verdict:
        """See Environment."""
        return (await self.verify_group(row, [response], [session]))[0]

    async def verify_group(self, row: Row, responses: Sequence[Response], sessions: Sequence[Session]) -> list[Verdict]:
        """See Environment."""
        places = [self._place(session) for session in sessions]
        verdicts: list[Verdict] = await self._ask("verify_group", row, list(responses), places)
        return verdicts

    async def release(self, session: Session) -> None:
        """See Environment."""
        if not self._stateless:
            await self._ask("release", session.state)

    def _place(self, session: Session) -> int | Session:
        return session if self._stateless else session.state

    async def _ask(self, method: str, *arguments: Any) -> Any:
        return await answer(self._worker.call(method, self.name, *arguments), self._worker)


@dataclass(frozen=True)
class JudgesBehindHttp:
    """The judges behind HTTP of an EnvironmentWorker, as far as the training loop knows them."""

    worker: Worker

    def start_step(self, step: str) -> None:
        """See HttpJudge."""
        result_of(self.worker.call("start_step", step), self.worker, timeout_s=SILENT_SECONDS)


class PlacedEnvironmentSet(EnvironmentSet):
    """An EnvironmentSet whose environments work in an actor.

    Args:
        options, judges, only: as EnvironmentSet's; the judges serve for checking that none is missing.
        worker: an EnvironmentWorker.
    """

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
        self._placed: dict[str, PlacedEnvironment] = {}

    def get(self, name: str) -> Environment:
        """See EnvironmentSet."""
        if name not in self._placed:
            local = super().get(name)
            adding = self.worker.call("add", local.name, type(local), local.config)
            result_of(adding, self.worker, timeout_s=START_SECONDS)
            self._placed[name] = PlacedEnvironment(local, self.worker)
        return self._placed[name]

    async def start(self) -> None:
        """See EnvironmentSet."""
        await answer(self.worker.call("start"), self.worker)

    async def close(self) -> None:
        """See EnvironmentSet. What runs agents does so here, and is closed here as well."""
        for environment in self._environments.values():
            if environment.runs_agent:
                await environment.close()
        await answer(self.worker.call("close"), self.worker)
