"""JSON over HTTP on aiohttp with bounded retries, for judges and remote environments: of one server, or of equal ones.

All clients of a process share a loop in a thread and its connections, so that they serve whatever loop asks, and
blocking callers. Not for streaming. Proxies from the process environment are ignored on purpose: judges and environment
servers live on the cluster's own network.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import logging
import os
import random
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from nemotron_steps.environments.loop_thread import LoopThread
from nemotron_steps.errors import ConfigError
from nemotron_steps.waiting import waiting

if TYPE_CHECKING:
    from concurrent.futures import Future

    import aiohttp

_LOG = logging.getLogger(__name__)

RETRIED_STATUS = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
MAX_ANSWER = 256 * 1024 * 1024
"""Bytes: an agent's answer has the tokens of every turn."""
KEEP_ALIVE_S = 4.0
"""An unused connection is closed, sooner than servers do it (uvicorn: 5 s), so that none is lost under a request."""
LOST_FOR_S = 30.0
"""Of equal servers, one that gave no answer is asked last for so long, or for as long as it was waited for."""

Value = TypeVar("Value")


class HttpStatusError(Exception):
    """The server answered with an error status that another attempt would not change."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"HTTP {status}: {body[:500]}")
        self.status = status
        self.body = body


class ServerUnreachableError(Exception):
    """No usable answer within the retries; carries the last cause. `over_request`: every server asked took the request
    and failed over it (HTTP 500) every time, so it may be what they fail over."""

    def __init__(self, message: str, over_request: bool = False) -> None:
        super().__init__(message)
        self.over_request = over_request


class _NoAnswerError(ServerUnreachableError):
    """One attempt brought no answer; says why."""


@dataclass(eq=False)
class _Server:
    url: str
    in_flight: int = 0
    lost_until: float = 0.0


_wires: dict[int, tuple[LoopThread, aiohttp.ClientSession]] = {}
_starting = threading.Lock()


def _wire() -> tuple[LoopThread, aiohttp.ClientSession]:
    """The loop and the connections of this process."""
    import aiohttp

    async def session() -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
        return aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())  # cookies are callers'

    with _starting:
        if os.getpid() not in _wires:
            thread = LoopThread("json-http")
            _wires[os.getpid()] = thread, thread.run(session())
        return _wires[os.getpid()]


@atexit.register
def _end() -> None:
    if os.getpid() in _wires:  # not in a forked child, which has no such thread
        thread, session = _wires.pop(os.getpid())
        thread.stop(session.close)


def run(work: Coroutine[Any, Any, Value]) -> Value:
    """What a coroutine of clients comes to, for blocking callers."""
    return _wire()[0].run(work)


class JsonClient:
    """A JSON client of one server, or of equal ones: the least loaded is asked first, and where it gives no answer,
    the next. One that is never used costs nothing.

    Args:
        ready_path: answers below 500 when a server is ready.
        timeout_s: of one attempt at one server.
        retries: further attempts, on connection errors and RETRIED_STATUS.
        backoff_s: first pause between attempts; doubles, with jitter, up to 30 s.
        max_concurrency: requests in flight at once, times the servers; the others queue.
    """

    def __init__(
        self,
        base_url: str | Sequence[str],
        *,
        ready_path: str = "/",
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 600.0,
        retries: int = 3,
        backoff_s: float = 0.5,
        max_concurrency: int = 64,
    ) -> None:
        urls = [base_url] if isinstance(base_url, str) else base_url
        for url in urls:
            if not _well_formed(url):
                raise ConfigError("a server URL is malformed", expected="http://HOST:PORT or https://HOST", found=url)
        self.base_urls = tuple(url.rstrip("/") for url in urls)
        self.base_url = ", ".join(self.base_urls)
        self._servers = [_Server(url) for url in self.base_urls]
        self._free = asyncio.Semaphore(max_concurrency * len(urls))
        self._turn = 0
        self._headers = {"Accept": "application/json", **(headers or {})}
        self._ready_path, self._timeout_s = ready_path, timeout_s
        self._retries, self._backoff_s = retries, backoff_s
        self._closed = False
        self._pending: set[Future[Any]] = set()

    async def post(
        self, path: str, body: Any, *, cookies: str | None = None, headers: Mapping[str, str] | None = None
    ) -> tuple[Any, str | None]:
        """POST `body` as JSON. Returns the parsed answer and the cookies the server set ("a=b; c=d") or None.

        HttpStatusError: the server refused the request (3xx, 4xx), or its answer is nested too deep to be read.
        ServerUnreachableError: every attempt failed, or the answer was not JSON.
        """
        sent = {**(headers or {}), "Content-Type": "application/json"}
        if cookies:
            sent["Cookie"] = cookies
        return await self._request("POST", path, json.dumps(body).encode(), sent)

    async def get(self, path: str) -> Any:
        return (await self._request("GET", path, None, {}))[0]

    def read(self, path: str) -> Any:
        return run(self.get(path))

    def wait_until_ready(self, timeout_s: float) -> None:
        run(self.wait_ready(timeout_s))

    async def wait_ready(self, timeout_s: float) -> None:
        """Poll `ready_path` once a second until it answers below 500. Of several servers one is enough."""
        deadline = time.monotonic() + timeout_s
        with waiting(f"{self.base_url} to be ready", timeout_s):
            while True:
                causes = await asyncio.gather(*(self._not_ready(url, min(5.0, timeout_s)) for url in self.base_urls))
                if None in causes:
                    return
                if time.monotonic() + 1.0 > deadline:
                    raise ServerUnreachableError("; ".join(f"{cause} after {timeout_s:g} s" for cause in causes))
                await asyncio.sleep(1.0)

    def close(self) -> None:
        """Requests in flight are broken off: ServerUnreachableError."""
        self._closed = True
        for future in list(self._pending):
            future.cancel()

    async def _not_ready(self, url: str, timeout_s: float) -> str | None:
        try:
            status, raw, _ = await self._on_loop(_ask("GET", url + self._ready_path, None, self._headers, timeout_s))
        except _NoAnswerError as error:
            return f"{url}{self._ready_path} not ready ({error})"
        return None if status < 500 else f"{url}{self._ready_path} not ready (HTTP {status}: {raw[:200]!r})"

    async def _request(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> tuple[Any, str | None]:
        cause, over_request = "", True
        for attempt in range(self._retries + 1):
            if attempt:
                pause = min(30.0, self._backoff_s * 2 ** (attempt - 1))
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            try:
                status, raw, cookies = await self._on_loop(self._attempt(method, path, body, headers))
            except _NoAnswerError as error:
                cause, over_request = str(error), over_request and error.over_request
                continue
            if status >= 300:
                raise HttpStatusError(status, raw.decode(errors="replace"))
            try:
                return json.loads(raw), cookies
            except ValueError:
                cause, over_request = f"answer is not JSON: {raw[:200]!r}", False
            except RecursionError as error:
                raise HttpStatusError(status, "the answer is nested too deep") from error
        message = f"{self.base_url}{path} failed {self._retries + 1} times ({cause})"
        if len(self._servers) > 1:
            message = f"none of {len(self._servers)} servers answers {path} ({cause})"
        raise ServerUnreachableError(message, over_request)

    async def _on_loop(self, work: Coroutine[Any, Any, Value]) -> Value:
        if self._closed:
            work.close()
            raise ServerUnreachableError(f"{self.base_url}: the client is closed")
        future = asyncio.run_coroutine_threadsafe(work, _wire()[0].loop)
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError as error:
            if self._closed:
                raise ServerUnreachableError(f"{self.base_url}: the client was closed") from error
            raise

    async def _attempt(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> tuple[int, bytes, str | None]:
        """Status, body and new cookies of the first answer; no status is in RETRIED_STATUS."""
        causes, over_request = {}, True
        async with self._free:
            for server in self._in_order():
                server.in_flight += 1
                begun = time.monotonic()
                try:
                    sent = {**self._headers, **headers}
                    answer = await _ask(method, server.url + path, body, sent, self._timeout_s)
                except _NoAnswerError as error:
                    cause, over_request = str(error), False
                else:
                    if answer[0] not in RETRIED_STATUS:
                        server.lost_until = 0.0
                        return answer
                    cause, over_request = f"HTTP {answer[0]}: {answer[1][:200]!r}", over_request and answer[0] == 500
                finally:
                    server.in_flight -= 1
                causes[server.url] = cause
                now = time.monotonic()
                if len(self._servers) > 1 and server.lost_until < now:
                    _LOG.warning("%s gives no answer (%s); the others are asked", server.url, cause)
                server.lost_until = now + max(LOST_FOR_S, now - begun)
        told = [f"{url}: {cause}" for url, cause in causes.items()]
        raise _NoAnswerError("; ".join(told) if len(told) > 1 else cause, over_request)

    def _in_order(self) -> list[_Server]:
        """Whom to ask: the least loaded first, equal ones in turn, lost ones last."""
        self._turn = (self._turn + 1) % len(self._servers)
        turned = self._servers[self._turn :] + self._servers[: self._turn]
        now = time.monotonic()
        # One that was lost gets its next question alone.
        return sorted(turned, key=lambda s: (s.lost_until > (0.0 if s.in_flight else now), s.in_flight))


async def _ask(
    method: str, address: str, body: bytes | None, headers: Mapping[str, str], timeout_s: float
) -> tuple[int, bytes, str | None]:
    """Status, body and new cookies of one server's answer."""
    import aiohttp
    from yarl import URL

    url = URL(address, encoded=True)
    limit = aiohttp.ClientTimeout(total=timeout_s)
    options: dict[str, Any] = {"data": body, "headers": headers, "allow_redirects": False, "timeout": limit}
    try:
        with waiting(f"an answer from {url.with_query(None)}", timeout_s):
            async with _wire()[1].request(method, url, **options) as answer:
                raw = bytearray()
                async for piece in answer.content.iter_any():
                    raw += piece
                    if len(raw) > MAX_ANSWER:
                        raise _NoAnswerError(f"the answer is over {MAX_ANSWER} bytes")
                pairs = [value.split(";", 1)[0] for value in answer.headers.getall("Set-Cookie", [])]
                return answer.status, bytes(raw), "; ".join(pairs) or None
    except TimeoutError as error:
        raise _NoAnswerError(f"no answer within {timeout_s:g} s") from error
    except (aiohttp.ClientError, OSError) as error:
        raise _NoAnswerError(f"{type(error).__name__}: {error}") from error


def _well_formed(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port beyond 65535, half of an IPv6 address
        return False
