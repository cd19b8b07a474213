"""Serve an environment over HTTP with the NeMo-Gym endpoints: /seed_session, /{tool}, /verify, and /verify_group for
groups. Loopback unless told otherwise. Clients are bounded in number, in time and in kind (http_bounds.py).

A session is a cookie. A rollout that could not be judged answers `"reward": null` with its failure class and
`instance_config.mask_sample`, so that no client takes it for a zero.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from types import TracebackType
from typing import Any
from urllib.parse import unquote

from nemotron_steps.environments.base import Environment, Response, Session, Verdict
from nemotron_steps.environments.http_server import HttpServer, Reply, Request
from nemotron_steps.environments.loop_thread import LoopThread
from nemotron_steps.errors import DataError, StepsError

COOKIE = "session"


@dataclass
class _Held:
    session: Session
    used: float


class EnvironmentServer:
    """An environment on a port, from `with` to its end.

    Args:
        environment: started by the server, on the server's own event loop, in a thread of its own.
        host, port: where to listen; port 0 picks a free one, see `url`.
        session_ttl_s: sessions unused for longer are released.
    """

    def __init__(
        self, environment: Environment, *, host: str = "127.0.0.1", port: int = 0, session_ttl_s: float = 3600.0
    ) -> None:
        self.environment = environment
        self._ttl = session_ttl_s
        self._sessions: dict[str, _Held] = {}
        self._http = HttpServer(self._answer, host=host, port=port)

    @property
    def url(self) -> str:
        """Base URL to reach it at."""
        return self._http.url

    def __enter__(self) -> EnvironmentServer:
        self._thread = LoopThread("environment")
        self._thread.run(self._start())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.run(self._close())
        self._thread.stop()

    async def _start(self) -> None:
        await self.environment.start()
        await self._http.start()

    async def _close(self) -> None:
        await self._http.stop()
        for held in self._sessions.values():
            await self.environment.release(held.session)
        await self.environment.close()

    async def _answer(self, request: Request) -> Reply:
        if request.method == "GET":
            known = request.path in ("/", "/health")
            return Reply(200, {"environment": self.environment.name}) if known else Reply(404, {"error": "?"})
        if request.method != "POST":
            return Reply(405, {"error": f"{request.method} is not allowed"}, (("Allow", "GET, POST"),))
        try:
            body = json.loads(request.body or b"{}")
            if not isinstance(body, dict):
                raise ValueError("not an object")
        except (ValueError, RecursionError) as error:
            return Reply(400, {"error": f"the body is no JSON object: {error}"})
        try:
            return await self._post(unquote(request.path.strip("/")), body, _cookie(request))
        except DataError as error:
            return Reply(422, {"error": error.to_dict()})
        except (KeyError, TypeError, AttributeError) as error:
            return Reply(422, {"error": f"malformed request: {error!r}"})
        except StepsError as error:
            return Reply(503, {"error": error.to_dict()})

    async def _post(self, path: str, body: dict[str, Any], cookie: str | None) -> Reply:
        await self._expire()
        if path == "seed_session":
            self.environment.check_row(body, "request")
            session = await self.environment.seed(body)
            key = secrets.token_urlsafe(24)
            self._sessions[key] = _Held(session, time.monotonic())
            return Reply(200, {"tools": session.tools}, (("Set-Cookie", f"{COOKIE}={key}; HttpOnly; SameSite=Strict"),))
        if path == "verify":
            return await self._verify(body, cookie)
        if path == "verify_group":
            return await self._verify_group(body)
        held = self._sessions.get(cookie or "")
        if held is None:
            return Reply(404, {"error": f"no session for tool {path!r}; POST /seed_session first and send its cookie"})
        held.used = time.monotonic()
        return Reply(200, {"output": await self.environment.call_tool(held.session, path, body)})

    async def _verify(self, body: dict[str, Any], cookie: str | None) -> Reply:
        if self.environment.judges_groups:
            return Reply(400, {"error": f"{self.environment.name} judges groups: POST /verify_group"})
        self.environment.check_row(body, "request")
        held = self._sessions.pop(cookie or "", None)
        session = held.session if held is not None else await self.environment.seed_recorded(body)
        try:
            (verdict,) = await self.environment.verify_group(body, [_response(body["response"])], [session])
        finally:
            await self.environment.release(session)
        return Reply(200, {**body, **_as_json(verdict)})

    async def _verify_group(self, body: dict[str, Any]) -> Reply:
        row = body["row"]
        self.environment.check_row(row, "request")
        sessions: list[Session] = []
        try:
            for _ in body["responses"]:
                sessions.append(await self.environment.seed_recorded(row))
            responses = [_response(item) for item in body["responses"]]
            verdicts = await self.environment.verify_group(row, responses, sessions)
        finally:
            for session in sessions:
                await self.environment.release(session)
        return Reply(200, {"verdicts": [_as_json(verdict) for verdict in verdicts]})

    async def _expire(self) -> None:
        limit = time.monotonic() - self._ttl
        old = [key for key, held in self._sessions.items() if held.used < limit]
        for held in [self._sessions.pop(key) for key in old]:
            await self.environment.release(held.session)


def _cookie(request: Request) -> str | None:
    try:
        morsel = SimpleCookie(request.headers.get("cookie") or "").get(COOKIE)
    except CookieError:
        return None
    return morsel.value if morsel is not None else None


def _response(body: Mapping[str, Any]) -> Response:
    return Response.from_output(body["output"], truncated=bool(body.get("incomplete_details")))


def _as_json(verdict: Verdict) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "reward": verdict.reward,
        "components": verdict.components,
        "failure": verdict.failure,
        "details": verdict.details,
    }
    if verdict.failure is not None:
        answer["failure_reason"] = verdict.failure
        answer["instance_config"] = {"mask_sample": True}
    return answer
