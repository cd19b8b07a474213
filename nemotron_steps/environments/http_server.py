"""An HTTP server on aiohttp: JSON in, JSON or server-sent events out.

A handler whose client goes away is cancelled, so that nobody decodes for a closed connection. Bound to loopback unless
told otherwise. Not for: what is served, or TLS.

Clients are bounded in number, in time and in kind: servers live in processes that also write checkpoints, so clients
must never take all file descriptors; they have no passwords, so a web page opened on the same machine must not reach
them, not by its own name rebound to this address (the Host tells), nor across origins (the Origin tells).
"""

import asyncio
import ipaddress
import json
import resource
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from nemotron_steps.errors import UnsupportedError

IDLE_S = 30.0
"""The head of a request is whole within this of the connection's start, or of the answer to the last request."""
READ_S = 60.0
"""A request's body is whole within this of its head. Its answer may take hours."""
MAX_CONNECTIONS = 1024
"""And at most a quarter of the descriptors that the process may have."""

_BUSY_BODY = b'{"error": {"message": "too many open connections; try again later", "type": "overloaded"}}'
BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(_BUSY_BODY), _BUSY_BODY)
)


def stranger(host: str | None, origin: str | None, *, bound: str) -> tuple[HTTPStatus, str] | None:
    """Why a request is refused, as a status and a message; None when it is not."""
    if host is not None and not _is_own(host, bound):
        message = f"this server is not {host!r}: use its IP address, localhost or {socket.gethostname()}"
        return HTTPStatus.MISDIRECTED_REQUEST, message
    own = {f"{scheme}://{host}".lower() for scheme in ("http", "https")} if host is not None else set()
    if origin is not None and origin.lower() not in own:
        return HTTPStatus.FORBIDDEN, f"web pages of {origin!r} may not ask this server"
    return None


def _is_own(host: str, bound: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname
        if name not in {"localhost", bound.lower(), socket.gethostname().lower()}:
            ipaddress.ip_address(name or "")  # an address cannot be rebound, only names can
    except ValueError:
        return False
    return True


MAX_BODY = 64 * 1024 * 1024
_ACCEPTED_AT_ONCE = 16
_QUEUED = 1024
_LINGER_S = 1.0
"""For a client that is still sending what was refused, so that it reads why."""


@dataclass(frozen=True)
class Request:
    """One request. Header names are lower case; `path` has no query and is not decoded."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True)
class Reply:
    """A whole JSON answer."""

    status: int
    body: Any
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class EventStream:
    """Server-sent events; each item is the `data` of one."""

    events: AsyncGenerator[str, None]


Handler = Callable[[Request], Awaitable[Reply | EventStream]]


class HttpServer:
    """Serves one handler, whose exceptions are logged and answered 500, on one port, which is bound at once, so that it
    is taken before anybody is told of it; port 0 picks a free one."""

    def __init__(self, handler: Handler, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self._handler = handler
        self._host = host
        try:
            self._socket = socket.create_server((host, port))
        except OSError as error:
            raise UnsupportedError(
                "the server cannot listen there",
                where=f"{host}:{port}",
                expected="a free port of an address of this machine",
                found=error.strerror,
                hints=("--port 0   # any free port", "--host 127.0.0.1   # this machine only"),
            ) from error
        self._socket.setblocking(False)
        self._connections: _Connections | None = None
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        """Base URL, without a path."""
        host, port = self._socket.getsockname()[:2]
        return f"http://{host}:{port}"

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        bounded: Any = web.BaseRequest
        self._connections = _Connections(
            self._answer,
            request_factory=lambda *parts: bounded(*parts, loop, client_max_size=MAX_BODY),
            handler_cancellation=True,
            # Until a head is whole, from the connection's start or the last answer.
            keepalive_timeout=IDLE_S,
            lingering_time=_LINGER_S,
            access_log=None,  # requests belong to the run's own journal
        )
        # The loop accepts as many connections in one go as `backlog` says, each a descriptor before it can be refused.
        self._server = await loop.create_server(self._connections, sock=self._socket, backlog=_ACCEPTED_AT_ONCE)
        self._socket.listen(_QUEUED)

    async def stop(self) -> None:
        """Close the port and every connection; running handlers are cancelled."""
        if self._server is None or self._connections is None:
            self._socket.close()
            return
        self._server.close()
        await self._connections.shutdown(0.01)
        await self._server.wait_closed()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        refused = stranger(request.headers.get("Host"), request.headers.get("Origin"), bound=self._host)
        if refused is not None:
            return _refusal(*refused)
        if (request.content_length or 0) > MAX_BODY:
            return _refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body is over {MAX_BODY} bytes")
        if request.headers.get("Expect", "").lower() == "100-continue":
            assert request.transport is not None, "it would be cancelled"
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        try:
            async with asyncio.timeout(READ_S):
                body = await request.read()
        except TimeoutError:
            return _refusal(HTTPStatus.REQUEST_TIMEOUT, f"the body was not whole within {READ_S:g} s")
        except web.HTTPRequestEntityTooLarge:
            return _refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body is over {MAX_BODY} bytes")
        headers = {name.lower(): value for name, value in request.headers.items()}
        answer = await self._handler(Request(request.method, request.rel_url.raw_path, headers, body))
        if isinstance(answer, EventStream):
            return await _stream(request, answer)
        return _json(answer.status, answer.body, answer.headers)


class _Connection(web.RequestHandler):
    __slots__ = ()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Bytes that are not a request, and handlers that break."""
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            self.log_exception("request %s %s failed", request.method, request.path, exc_info=exc)
        return _refusal(status, message or HTTPStatus(status).phrase)


class _Connections(web.Server):
    """aiohttp's connections, up to a bound; those beyond it are told so and closed at once."""

    def __init__(self, handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]], **options: Any) -> None:
        super().__init__(handler, **options)
        self._options = {k: v for k, v in options.items() if k not in ("request_factory", "handler_cancellation")}
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        unlimited = descriptors == resource.RLIM_INFINITY
        self._most = MAX_CONNECTIONS if unlimited else max(1, min(MAX_CONNECTIONS, descriptors // 4))

    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=asyncio.get_running_loop(), **self._options)

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        if len(self.connections) >= self._most:
            transport.write(BUSY)
            transport.close()
        else:
            super().connection_made(handler, transport)


def _json(status: int, body: Any, headers: tuple[tuple[str, str], ...] = ()) -> web.Response:
    kept = {"Content-Type": "application/json", **dict(headers)}
    return web.Response(status=status, body=json.dumps(body).encode(), headers=kept)


def _refusal(status: int, message: str) -> web.Response:
    """What ends the connection."""
    kind = "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
    response = _json(status, {"error": {"message": message, "type": kind}})
    response.force_close()
    return response


async def _stream(request: web.BaseRequest, answer: EventStream) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    async with aclosing(answer.events) as events:
        await response.prepare(request)
        async for event in events:
            await response.write(f"data: {event}\n\n".encode())
    await response.write_eof()
    return response
