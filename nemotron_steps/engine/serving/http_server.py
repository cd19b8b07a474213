"""A small asyncio HTTP/1.1 server: JSON in, JSON or server-sent events out. Standard library only.

A handler whose client goes away is cancelled, so that nobody decodes for a closed connection. Bound to loopback unless
told otherwise. Clients are bounded in number, in time and in kind (http_bounds.py). Not for: what is served
(endpoint.py), TLS, or requests in chunks.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from nemotron_steps.environments import http_bounds

MAX_HEAD = 64 * 1024
MAX_BODY = 64 * 1024 * 1024
_CHUNK = 64 * 1024
_ACCEPTED_AT_ONCE = 16
_QUEUED = 1024


@dataclass(frozen=True)
class Request:
    """One request. Header names are lower case; `path` has no query."""

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


class _BadRequestError(Exception):
    """The bytes are no request that can be answered further; the connection closes after `reply`."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.reply = Reply(status, {"error": {"message": message, "type": "invalid_request_error"}})


class _ClientGoneError(Exception):
    """The client closed the connection while its request was being answered."""


class HttpServer:
    """Serves one handler on one port.

    Args:
        handler: answers every request; an exception it raises closes that connection and goes to the event loop's
            exception handler.
        host, port: bound at once, so that `port` is taken before anybody is told of it; port 0 picks a free one.
    """

    def __init__(self, handler: Handler, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self._handler = handler
        self._host = host
        self._most = http_bounds.most_connections()
        self._socket = socket.create_server((host, port))
        self._socket.setblocking(False)
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """Base URL, without a path."""
        host, port = self._socket.getsockname()[:2]
        return f"http://{host}:{port}"

    async def start(self) -> None:
        """Begin to answer, on the running loop."""
        # The loop accepts as many connections in one go as `backlog` says, each a descriptor before it can be refused.
        self._server = await asyncio.start_server(
            self._accept, sock=self._socket, limit=MAX_HEAD, backlog=_ACCEPTED_AT_ONCE
        )
        self._socket.listen(_QUEUED)

    async def stop(self) -> None:
        """Close the port and every connection; running handlers are cancelled."""
        if self._server is None:
            self._socket.close()
            return
        self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await self._server.wait_closed()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= self._most:
            writer.write(http_bounds.BUSY)
            writer.close()
            return
        connection = _Connection(reader, writer, self._handler, self._host)
        task = asyncio.get_running_loop().create_task(connection.serve())
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)


class _Connection:
    """One client: its requests, one after another."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, handler: Handler, bound: str
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._handler = handler
        self._bound = bound
        self._buffer = bytearray()

    async def serve(self) -> None:
        """Answer requests until either side closes."""
        try:
            while (request := await self._next_request()) is not None:
                answer = await self._until_gone(self._handler(request))
                await self._until_gone(self._write(answer))
                if request.headers.get("connection", "").lower() == "close":
                    break
        except _BadRequestError as error:
            await self._write(error.reply)
        except (_ClientGoneError, ConnectionError):
            return  # nobody is left to answer
        finally:
            self._writer.close()

    async def _more(self) -> bool:
        """Read what has come; False at the end of the stream."""
        data = await self._reader.read(_CHUNK)
        self._buffer += data
        return bool(data)

    async def _next_request(self) -> Request | None:
        """The next request, from a client that may ask; None when none came or the client closed the connection."""
        if not self._buffer:
            try:
                async with asyncio.timeout(http_bounds.IDLE_S):
                    await self._more()
            except TimeoutError:
                return None
        try:
            async with asyncio.timeout(http_bounds.READ_S):
                request = await self._read_request()
        except TimeoutError as error:
            message = f"the request was not whole within {http_bounds.READ_S:g} s"
            raise _BadRequestError(HTTPStatus.REQUEST_TIMEOUT, message) from error
        if request is not None:
            refused = http_bounds.stranger(
                request.headers.get("host"), request.headers.get("origin"), bound=self._bound
            )
            if refused is not None:
                raise _BadRequestError(*refused)
        return request

    async def _read_request(self) -> Request | None:
        """The next request; None when the client closed the connection between two."""
        while (end := self._buffer.find(b"\r\n\r\n")) < 0:
            if len(self._buffer) > MAX_HEAD:
                raise _BadRequestError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the request's head is too long")
            if not await self._more():
                return None
        head = bytes(self._buffer[:end]).decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        try:
            method, target, version = head[0].split(" ")
            headers = {}
            for line in head[1:]:
                name, separator, value = line.partition(":")
                if not separator:
                    raise ValueError(line)
                headers[name.strip().lower()] = value.strip()
            length = int(headers.get("content-length", "0"))
        except ValueError as error:
            raise _BadRequestError(HTTPStatus.BAD_REQUEST, f"malformed request: {error}") from error
        if not version.startswith("HTTP/1.") or "transfer-encoding" in headers or length < 0:
            raise _BadRequestError(HTTPStatus.NOT_IMPLEMENTED, "send HTTP/1.1 with a Content-Length")
        if length > MAX_BODY:
            raise _BadRequestError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body is over {MAX_BODY} bytes")
        if headers.get("expect", "").lower() == "100-continue":
            self._writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        while len(self._buffer) < length:
            if not await self._more():
                return None
        body = bytes(self._buffer[:length])
        del self._buffer[:length]
        return Request(method, target.partition("?")[0], headers, body)

    async def _until_gone(self, work: Awaitable[Any]) -> Any:
        """Run `work`, and cancel it when the client closes the connection."""
        answering = asyncio.ensure_future(work)
        watching = asyncio.ensure_future(self._end_of_stream())
        try:
            await asyncio.wait({answering, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                watching.result()
                raise _ClientGoneError
            return answering.result()
        finally:
            for task in (answering, watching):
                task.cancel()
            await asyncio.gather(answering, watching, return_exceptions=True)

    async def _end_of_stream(self) -> None:
        """Return when the client has closed; a request sent ahead of the answer waits in the buffer."""
        while len(self._buffer) <= MAX_HEAD + MAX_BODY and await self._more():
            pass

    async def _write(self, answer: Reply | EventStream) -> None:
        if isinstance(answer, EventStream):
            self._head(HTTPStatus.OK, "text/event-stream", (("Transfer-Encoding", "chunked"),))
            async with aclosing(answer.events) as events:
                async for event in events:
                    data = f"data: {event}\n\n".encode()
                    self._writer.write(b"%x\r\n%b\r\n" % (len(data), data))
                    await self._writer.drain()
            self._writer.write(b"0\r\n\r\n")
        else:
            data = json.dumps(answer.body).encode()
            self._head(answer.status, "application/json", (("Content-Length", str(len(data))), *answer.headers))
            self._writer.write(data)
        await self._writer.drain()

    def _head(self, status: int, content_type: str, headers: tuple[tuple[str, str], ...]) -> None:
        lines = [f"HTTP/1.1 {int(status)} {HTTPStatus(status).phrase}", f"Content-Type: {content_type}"]
        lines += [f"{name}: {value}" for name, value in headers]
        self._writer.write(("\r\n".join(lines) + "\r\n\r\n").encode())
