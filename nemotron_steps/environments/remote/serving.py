"""Serve an environment over HTTP as NeMo-Gym's resources servers are: loopback unless told otherwise, clients bounded
in number, in time and in kind (http_server.py).

    POST /seed_session, /{tool}, /verify

A session is a cookie, sent again with every answer, because NeMo-Gym's agents keep those of the last one only. A
rollout that could not be judged answers `"reward": null` with its failure class and `mask_sample`, so that no client
takes it for a zero.
"""

import json
import secrets
import time
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from typing import Any, Self
from urllib.parse import unquote

from nemotron_steps.environments.base import Environment, Session
from nemotron_steps.environments.http_server import HttpServer, Reply, Request
from nemotron_steps.environments.loop_thread import LoopThread
from nemotron_steps.environments.responses import Response
from nemotron_steps.errors import DataError, StepsError, UnsupportedError

COOKIE = "session"
_OF_SESSIONS = frozenset({"seed_session", "verify"})
_ALIVE = frozenset({"/", "/health", "/healthz", "/livez", "/readyz"})


@dataclass
class _Held:
    session: Session
    used: float


class EnvironmentServer:
    """An environment on a port, from `with` to its end; it runs on an event loop in a thread of its own.

    Args:
        host, port: where to listen; port 0 picks a free one, see `url`.
        session_ttl_s: sessions unused for longer are released.
    """

    def __init__(
        self,
        environment: Environment,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        session_ttl_s: float = 3600.0,
    ) -> None:
        if environment.judges_groups:
            message = f"`{environment.name}` judges all answers to a prompt together, and cannot be served"
            raise UnsupportedError(message, expected="an environment that judges one answer")
        self.environment = environment
        self._ttl = session_ttl_s
        self._sessions: dict[str, _Held] = {}
        self._http = HttpServer(self._answer, host=host, port=port)

    @property
    def url(self) -> str:
        return self._http.url

    def __enter__(self) -> Self:
        self._thread = LoopThread("environment")
        self._thread.run(self.environment.start())
        self._thread.run(self._http.start())
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.run(self._close())
        self._thread.stop()

    async def _close(self) -> None:
        await self._http.stop()
        for held in self._sessions.values():
            await self.environment.release(held.session)
        await self.environment.close()

    async def _answer(self, request: Request) -> Reply:
        if request.method == "GET":
            if request.path in _ALIVE:
                return Reply(200, {"environment": self.environment.name, "status": "ok"})
            return Reply(404, {"error": f"no {request.path} here"})
        if request.method != "POST":
            return Reply(405, {"error": f"{request.method} is not allowed"}, (("Allow", "GET, POST"),))
        try:
            body = json.loads(request.body or b"{}")
            if not isinstance(body, dict):
                raise ValueError("not an object")
        except (ValueError, RecursionError) as error:
            return Reply(400, {"error": f"the body must be a JSON object: {error}"})
        try:
            cookie = SimpleCookie(request.headers.get("cookie") or "").get(COOKIE)
        except CookieError:
            cookie = None
        try:
            return await self._post(unquote(request.path.strip("/")), body, cookie.value if cookie else "")
        except DataError as error:
            return Reply(422, {"error": error.to_dict()})
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            return Reply(422, {"error": f"malformed request: {error!r}"})
        except StepsError as error:
            return Reply(503, {"error": error.to_dict()})

    async def _post(self, path: str, body: dict[str, Any], cookie: str) -> Reply:
        limit = time.monotonic() - self._ttl
        old = [key for key, held in self._sessions.items() if held.used < limit]
        for expired in [self._sessions.pop(key) for key in old]:
            await self.environment.release(expired.session)
        held = self._sessions.get(cookie)
        if held is not None and path not in _OF_SESSIONS:
            held.used = time.monotonic()
            output = await self.environment.call_tool(held.session, path, body)
            return Reply(200, {"output": output}, _set_cookie(cookie))
        if path == "seed_session":
            self.environment.check_row_with_resources(body, "request")
            session = await self.environment.seed(body)
            key = secrets.token_urlsafe(24)
            self._sessions[key] = _Held(session, time.monotonic())
            return Reply(200, {"tools": session.tools}, _set_cookie(key))
        if path == "verify":
            self.environment.check_row_with_resources(body, "request")
            cut = bool(body["response"].get("incomplete_details"))
            response = Response.from_output(body["response"]["output"], truncated=cut)
            if held is None:
                session = await self.environment.seed_recorded(body)
            else:
                session = self._sessions.pop(cookie).session
            try:
                (verdict,) = await self.environment.judge_group(body, [response], [session])
            finally:
                await self.environment.release(session)
            masked: dict[str, Any] = {}
            if (failure := verdict.failure) is not None:
                masked = {"failure_kind": failure, "failure_reason": failure, "mask_sample": True}
                masked["instance_config"] = {"mask_sample": True}
            return Reply(200, {**body, **vars(verdict), **masked})
        return Reply(404, {"error": f"no session for tool {path!r}; POST /seed_session first and send its cookie"})


def _set_cookie(key: str) -> tuple[tuple[str, str], ...]:
    return (("Set-Cookie", f"{COOKIE}={key}; HttpOnly; SameSite=Strict"),)
