"""Serve an environment over HTTP with the NeMo-Gym endpoints: /seed_session, /{tool}, /verify, and /verify_group for
groups. Standard library only; loopback unless told otherwise. Clients are bounded in number, in time and in kind
(http_bounds.py).

A session is a cookie. A rollout that could not be judged answers `"reward": null` with its failure class and
`instance_config.mask_sample`, so that no client takes it for a zero.
"""

from __future__ import annotations

import asyncio
import io
import json
import secrets
import socket
import threading
import time
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import unquote

from nemotron_steps.environments import http_bounds
from nemotron_steps.environments.base import Environment, Response, Session, Verdict
from nemotron_steps.errors import DataError, StepsError

COOKIE = "session"
MAX_BODY = 64 * 1024 * 1024

Value = TypeVar("Value")


@dataclass
class _Held:
    session: Session
    used: float


class EnvironmentServer:
    """An environment on a port, from `with` to its end.

    Args:
        environment: started by the server, on the server's own event loop.
        host, port: where to listen; port 0 picks a free one, see `url`.
        session_ttl_s: sessions unused for longer are released.
    """

    def __init__(
        self, environment: Environment, *, host: str = "127.0.0.1", port: int = 0, session_ttl_s: float = 3600.0
    ) -> None:
        self.environment = environment
        self._ttl = session_ttl_s
        self._sessions: dict[str, _Held] = {}
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._http = _BoundedServer((host, port), _handler(self, host))
        self._threads = [
            threading.Thread(target=self._loop.run_forever, name="environment-loop", daemon=True),
            threading.Thread(target=self._http.serve_forever, name="environment-http", daemon=True),
        ]

    @property
    def url(self) -> str:
        """Base URL to reach it at."""
        host, port = self._http.server_address[:2]
        return f"http://{host if isinstance(host, str) else host.decode()}:{port}"

    def __enter__(self) -> EnvironmentServer:
        self._threads[0].start()
        self.run(self.environment.start())
        self._threads[1].start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.shutdown()
        self._http.server_close()
        for held in self._sessions.values():
            self.run(self.environment.release(held.session))
        self.run(self.environment.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._threads[0].join()
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, Value]) -> Value:
        """Run a coroutine on the server's loop and wait for it, from any other thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def answer(self, path: str, body: dict[str, Any], cookie: str | None) -> tuple[int, Any, str | None]:
        """(status, JSON answer, new session cookie or None) of one request."""
        self._expire()
        if path == "seed_session":
            self.environment.check_row(body, "request")
            session = self.run(self.environment.seed(body))
            key = secrets.token_urlsafe(24)
            with self._lock:
                self._sessions[key] = _Held(session, time.monotonic())
            return 200, {"tools": session.tools}, key
        if path == "verify":
            return self._verify(body, cookie)
        if path == "verify_group":
            return self._verify_group(body)
        held = self._held(cookie)
        if held is None:
            return 404, {"error": f"no session for tool {path!r}; POST /seed_session first and send its cookie"}, None
        return 200, {"output": self.run(self.environment.call_tool(held.session, path, body))}, None

    def _verify(self, body: dict[str, Any], cookie: str | None) -> tuple[int, Any, str | None]:
        if self.environment.judges_groups:
            return 400, {"error": f"{self.environment.name} judges groups: POST /verify_group"}, None
        self.environment.check_row(body, "request")
        with self._lock:
            held = self._sessions.pop(cookie or "", None)
        session = held.session if held is not None else self.run(self.environment.seed(body))
        try:
            (verdict,) = self.run(self.environment.verify_group(body, [_response(body["response"])], [session]))
        finally:
            self.run(self.environment.release(session))
        return 200, {**body, **_as_json(verdict)}, None

    def _verify_group(self, body: dict[str, Any]) -> tuple[int, Any, str | None]:
        row = body["row"]
        self.environment.check_row(row, "request")
        sessions = [self.run(self.environment.seed(row)) for _ in body["responses"]]
        try:
            responses = [_response(item) for item in body["responses"]]
            verdicts = self.run(self.environment.verify_group(row, responses, sessions))
        finally:
            for session in sessions:
                self.run(self.environment.release(session))
        return 200, {"verdicts": [_as_json(verdict) for verdict in verdicts]}, None

    def _held(self, cookie: str | None) -> _Held | None:
        with self._lock:
            held = self._sessions.get(cookie or "")
            if held is not None:
                held.used = time.monotonic()
            return held

    def _expire(self) -> None:
        limit = time.monotonic() - self._ttl
        with self._lock:
            old = [key for key, held in self._sessions.items() if held.used < limit]
            released = [self._sessions.pop(key) for key in old]
        for held in released:
            self.run(self.environment.release(held.session))


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


class _BoundedServer(ThreadingHTTPServer):
    """A thread for each connection, up to a bound; those beyond it are told so and closed at once."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._free = threading.BoundedSemaphore(http_bounds.most_connections())
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            with suppress(OSError):  # it may have gone already
                request.sendall(http_bounds.BUSY)
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()


class _RequestBytes(io.RawIOBase):
    """What a client sends. TimeoutError when no request begins in time or one is not whole in time."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._due: float | None = None

    def next_request(self) -> None:
        """Wait for a first byte again."""
        self._due = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = http_bounds.IDLE_S if self._due is None else self._due - time.monotonic()
        if left <= 0:
            raise TimeoutError("the request was not whole in time")
        self._connection.settimeout(left)
        count = self._connection.recv_into(buffer)
        self._connection.settimeout(None)  # the answer has all the time it needs
        if self._due is None:
            self._due = time.monotonic() + http_bounds.READ_S
        return count


def _handler(server: EnvironmentServer, bound: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            self.rfile.close()
            self._bytes = _RequestBytes(self.connection)
            self.rfile = io.BufferedReader(self._bytes)

        def handle_one_request(self) -> None:
            self._bytes.next_request()
            super().handle_one_request()

        def do_GET(self) -> None:
            if self._refused():
                return
            known = self.path in ("/", "/health")
            self._send(200 if known else 404, {"environment": server.environment.name} if known else {"error": "?"})

        def do_POST(self) -> None:
            size = self.headers.get("Content-Length") or "0"
            if "Transfer-Encoding" in self.headers or not (size.isascii() and size.isdecimal() and len(size) < 20):
                self.close_connection = True
                self._send(400, {"error": "send the body whole, with its length as Content-Length"})
                return
            length = int(size)
            if length > MAX_BODY:
                self.close_connection = True
                self._send(413, {"error": f"body over {MAX_BODY} bytes"})
                return
            raw = self.rfile.read(length)
            if self._refused():
                return
            try:
                body = json.loads(raw or b"{}")
                if not isinstance(body, dict):
                    raise ValueError("not an object")
            except ValueError as error:
                self._send(400, {"error": f"the body is no JSON object: {error}"})
                return
            try:
                status, answer, cookie = server.answer(unquote(self.path.strip("/")), body, self._cookie())
            except DataError as error:
                status, answer, cookie = 422, {"error": error.to_dict()}, None
            except (KeyError, TypeError, AttributeError) as error:
                status, answer, cookie = 422, {"error": f"malformed request: {error!r}"}, None
            except StepsError as error:
                status, answer, cookie = 503, {"error": error.to_dict()}, None
            self._send(status, answer, cookie)

        def log_message(self, format: str, *args: Any) -> None:
            """Requests are not logged: their bodies belong to the run's own journal."""

        def _refused(self) -> bool:
            """Refuse a client that may not ask."""
            refused = http_bounds.stranger(self.headers.get("Host"), self.headers.get("Origin"), bound=bound)
            if refused is not None:
                self.close_connection = True
                self._send(refused[0], {"error": refused[1]})
            return refused is not None

        def _cookie(self) -> str | None:
            try:
                morsel = SimpleCookie(self.headers.get("Cookie") or "").get(COOKIE)
            except CookieError:
                return None
            return morsel.value if morsel is not None else None

        def _send(self, status: int, answer: Any, cookie: str | None = None) -> None:
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            if cookie is not None:
                self.send_header("Set-Cookie", f"{COOKIE}={cookie}; HttpOnly; SameSite=Strict")
            self.end_headers()
            self.wfile.write(data)

    return Handler
