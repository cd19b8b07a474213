"""An environment server's answers, one request at a time, without a socket."""

import asyncio
import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from nemotron_steps.environments.base import (
    Environment,
    EnvironmentConfig,
    GradeResult,
    Response,
    Row,
    Session,
)
from nemotron_steps.environments.http_server import Reply, Request
from nemotron_steps.environments.remote import serving
from nemotron_steps.environments.remote.serving import EnvironmentServer
from nemotron_steps.environments.responses import message_item
from nemotron_steps.errors import UnsupportedError, WorkerLostError

ROW: dict[str, Any] = {"responses_create_params": {"input": "Say."}}


class Pairs(Environment):
    """The reward is how often the tool was called; counts sessions that are open."""

    name: ClassVar[str] = "pairs"

    def __init__(self, *, groups: bool = False, fails: Exception | None = None) -> None:
        super().__init__(EnvironmentConfig(), {})
        self.judges_groups = groups  # type: ignore[misc]
        self.reward_range = (0.0, 9.0)
        self.fails = fails
        self.open = 0
        self.recorded = 0

    async def seed(self, row: Row) -> Session:
        self.open += 1
        return Session(tools=[{"name": "add"}], state=0)

    async def seed_recorded(self, row: Row) -> Session:
        self.recorded += 1
        return await self.seed(row)

    async def call_tool(self, session: Session, name: str, arguments: dict[str, Any]) -> str:
        session.state += 1
        return f"{name} {session.state}"

    async def verify(self, row: Row, response: Response, session: Session) -> GradeResult:
        raise AssertionError("groups are judged")

    async def verify_group(
        self, row: Row, responses: Sequence[Response], sessions: Sequence[Session]
    ) -> list[GradeResult]:
        if self.fails is not None:
            raise self.fails
        return [GradeResult(float(session.state)) for session in sessions]

    async def release(self, session: Session) -> None:
        self.open -= 1


async def asked(
    server: EnvironmentServer, path: str, body: Any = None, cookie: str = "", method: str = "POST"
) -> Reply:
    headers = {"cookie": f"session={cookie}"} if cookie else {}
    data = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
    return await server._answer(Request(method, path, headers, data))


def cookie_of(reply: Reply) -> str:
    return dict(reply.headers)["Set-Cookie"].partition(";")[0].removeprefix("session=")


def answered(text: str, question: str = "Say.", **more: Any) -> dict[str, Any]:
    return {"responses_create_params": {"input": question}, "response": {"output": [message_item(text)]}, **more}


def test_a_session_is_judged_once_and_a_second_time_as_a_recording() -> None:
    environment = Pairs()
    server = EnvironmentServer(environment)

    async def run() -> None:
        cookie = cookie_of(await asked(server, "/seed_session", ROW))
        reply = await asked(server, "/ad%64", {}, cookie)
        assert (reply.body, cookie_of(reply)) == ({"output": "add 1"}, cookie)
        for reward, recorded in ((1.0, 0), (0.0, 1)):
            reply = await asked(server, "/verify", answered("x"), cookie)
            assert (reply.body["reward"], environment.recorded, environment.open) == (reward, recorded, 0)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("PUT", "/verify", {}, 405),
        ("POST", "/verify", b"[1]", 400),
        ("POST", "/verify", b"{", 400),
        ("POST", "/verify", b"[" * 100_000, 400),
        ("POST", "/verify", {}, 422),
        ("POST", "/verify", ROW, 422),
        ("POST", "/add", {}, 404),
        ("GET", "/nothing", {}, 404),
        *(("GET", path, {}, 200) for path in ("/", "/health", "/healthz", "/livez", "/readyz")),
    ],
)
def test_each_request_has_its_status(method: str, path: str, body: Any, status: int) -> None:
    environment = Pairs()
    reply = asyncio.run(asked(EnvironmentServer(environment), path, body, method=method))
    assert (reply.status, environment.open) == (status, 0)


@pytest.mark.parametrize(
    ("error", "failure"), [(WorkerLostError("it died"), "environment_lost"), (KeyError("x"), "verify_failed")]
)
def test_sessions_are_released_where_judging_raises(error: Exception, failure: str) -> None:
    environment = Pairs(fails=error)
    reply = asyncio.run(asked(EnvironmentServer(environment), "/verify", answered("a")))
    assert (reply.status, reply.body["reward"], reply.body["failure"]) == (200, None, failure)
    assert reply.body["mask_sample"] and environment.open == 0


def test_a_session_is_kept_as_long_as_its_tools_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = Pairs()
    now = [0.0]
    monkeypatch.setattr(serving, "time", SimpleNamespace(monotonic=lambda: now[0]))
    server = EnvironmentServer(environment, session_ttl_s=10.0)

    async def run() -> None:
        cookie = cookie_of(await asked(server, "/seed_session", ROW))
        for moment, left in ((8.0, 1), (16.0, 1), (24.0, 1), (35.0, 0)):
            now[0] = moment
            await asked(server, "/add", {}, cookie)
            assert environment.open == left

    asyncio.run(run())


def test_a_server_that_closes_releases_its_sessions() -> None:
    environment = Pairs()
    server = EnvironmentServer(environment)

    async def run() -> None:
        await asked(server, "/seed_session", ROW)
        await server._close()

    asyncio.run(run())
    assert environment.open == 0


def test_an_environment_that_compares_answers_cannot_be_served() -> None:
    with pytest.raises(UnsupportedError):
        EnvironmentServer(Pairs(groups=True))
