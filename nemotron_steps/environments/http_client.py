"""JSON over HTTP on aiohttp with bounded retries, for judges and remote environments. Of several equal servers, those
that fail are routed around (replicas.py).

A client has an event loop in a thread of its own, so that it serves whatever loop asks, blocking callers too, and keeps
its connections between them. Not for streaming, and proxies from the process environment are ignored on purpose: judges
and environment servers live on the cluster's own network.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import random
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from nemotron_steps.environments.loop_thread import LoopThread
from nemotron_steps.errors import ConfigError
from nemotron_steps.waiting import waiting

if TYPE_CHECKING:
    import aiohttp

_LOG = logging.getLogger(__name__)

LOST_FOR_S = 10.0
"""A lost server is left alone at least so long: one that is ready and still fails must not be reported every second."""


@dataclass(eq=False)
class Replica:
    """One of the servers. `in_flight` counts requests that wait for `free`, too."""

    url: str
    free: asyncio.Semaphore
    in_flight: int = 0
    lost: bool = False


class Replicas:
    """Equal servers behind one client: which one is asked next, and which ones are lost for now. On one event loop.

    The least loaded is asked first, equal ones in turn. One that gives no answer is left alone, reported once, and
    comes back when it is ready again (`ready` returns then); where all are lost, all are asked, so that the last word
    is a server's and never a guess.
    """

    def __init__(self, urls: Sequence[str], max_concurrency: int, ready: Callable[[Replica], Awaitable[None]]) -> None:
        self.all = tuple(Replica(url, asyncio.Semaphore(max_concurrency)) for url in urls)
        self._ready = ready
        self._turn = 0
        self._recovering: dict[Replica, asyncio.Task[None]] = {}

    def in_order(self) -> list[Replica]:
        """Whom to ask, best first; lost ones last."""
        self._turn = (self._turn + 1) % len(self.all)
        turned = self.all[self._turn :] + self.all[: self._turn]
        return sorted(turned, key=lambda replica: (replica.lost, replica.in_flight))

    def lose(self, replica: Replica, cause: str) -> None:
        """It gave no answer. The only server there is cannot be lost: there is nobody else to ask."""
        if replica.lost or len(self.all) == 1:
            return
        replica.lost = True
        others = [each.url for each in self.all if not each.lost]
        _LOG.warning("%s gives no answer (%s); asked instead: %s", replica.url, cause, ", ".join(others) or "none left")
        self._recovering[replica] = asyncio.ensure_future(self._recover(replica))

    def find(self, replica: Replica) -> None:
        """It answers."""
        if replica.lost:
            replica.lost = False
            _LOG.warning("%s answers again", replica.url)
            # Lost once more, it is left alone for as long as the first time.
            recovering = self._recovering.pop(replica, None)
            if recovering is not None:
                recovering.cancel()

    async def _recover(self, replica: Replica) -> None:
        await asyncio.sleep(LOST_FOR_S)
        await self._ready(replica)
        del self._recovering[replica]
        self.find(replica)


RETRIED_STATUS = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
MAX_ANSWER = 256 * 1024 * 1024
"""Bytes: an agent's answer has the tokens of every turn."""
KEEP_ALIVE_S = 4.0
"""An unused connection is closed, sooner than servers do it (uvicorn: 5 s), so that none is lost under a request."""


class HttpStatusError(Exception):
    """The server answered with an error status that another attempt would not change."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"HTTP {status}: {body[:500]}")
        self.status = status
        self.body = body


class ServerUnreachableError(Exception):
    """No usable answer within the retries; carries the last cause. `over_request`: the servers took the request, and
    failed or did not end every time, so it may be what they fail over."""

    def __init__(self, message: str, over_request: bool = False) -> None:
        super().__init__(message)
        self.over_request = over_request


class _NoAnswerError(ServerUnreachableError):
    """One attempt brought no answer; says why."""


class _LostMeanwhileError(Exception):
    """The server was lost while a question waited for it; the question was not sent."""


READY_GRACE_S = 5.0
"""Equal servers are rarely ready in the same instant; later ones are waited for so long once the first one is."""


class _Held:
    """What a client has to end, and what runs there. It does not know the client, which it would keep alive."""

    def __init__(
        self, urls: Sequence[str], headers: Mapping[str, str], ready_path: str, timeout_s: float, max_concurrency: int
    ) -> None:
        self.thread: LoopThread | None = None
        self.session: aiohttp.ClientSession | None = None
        self.closed = False
        self.headers = headers
        self.ready_path = ready_path
        self.timeout_s = timeout_s
        self.base_url = ", ".join(urls)
        self.servers = Replicas(urls, max_concurrency, lambda server: self._ready(server, math.inf))

    def end(self, wait: bool) -> None:
        thread, self.thread = self.thread, None
        if thread is not None and wait:
            thread.stop(self._disconnect)
        elif thread is not None:
            thread.stop_soon(self._disconnect)

    async def _disconnect(self) -> None:
        if self.session is not None:
            await self.session.close()

    async def any(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> tuple[int, bytes, str | None]:
        """Status, body and new cookies of the first answer; no status is in RETRIED_STATUS. _NoAnswerError when no
        server gives one."""
        causes: dict[str, str] = {}
        over_request = True
        asking, left = self.servers.in_order(), set[Replica]()
        for server in asking:
            server.in_flight += 1
            though_lost = server.lost or server in left
            try:
                status, raw, cookies = await self._ask(server, method, path, body, headers, self.timeout_s, though_lost)
            except _LostMeanwhileError:
                left.add(server)
                asking.append(server)  # where no other server answers, it has the last word
                continue
            except _NoAnswerError as error:
                causes[server.url], over_request = str(error), over_request and error.over_request
            else:
                if status not in RETRIED_STATUS:
                    self.servers.find(server)
                    return status, raw, cookies
                causes[server.url], over_request = f"HTTP {status}: {raw[:200]!r}", over_request and status == 500
            finally:
                server.in_flight -= 1
            self.servers.lose(server, causes[server.url])
        if len(causes) == 1:
            raise _NoAnswerError(next(iter(causes.values())), over_request)
        raise _NoAnswerError("; ".join(f"{url}: {cause}" for url, cause in causes.items()), over_request)

    async def _ask(
        self,
        server: Replica,
        method: str,
        path: str,
        body: bytes | None,
        headers: Mapping[str, str],
        timeout_s: float,
        though_lost: bool = True,
    ) -> tuple[int, bytes, str | None]:
        """What one server answers. _LostMeanwhileError, unless `though_lost`, when it was lost before it was free: who
        queues for a server that hangs must not wait for one time-out after another."""
        import aiohttp
        from yarl import URL

        if self.session is None:
            self.session = aiohttp.ClientSession(
                headers=self.headers,
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
                cookie_jar=aiohttp.DummyCookieJar(),  # sessions are the callers'
            )
        sent = {**headers, "Content-Type": "application/json"} if body is not None else headers
        url = URL(server.url + path, encoded=True)
        try:
            async with server.free:
                if server.lost and not though_lost:
                    raise _LostMeanwhileError
                with waiting(f"an answer from {url.with_query(None)}", timeout_s):
                    async with self.session.request(
                        method,
                        url,
                        data=body,
                        headers=sent,
                        allow_redirects=False,
                        timeout=aiohttp.ClientTimeout(total=timeout_s),
                    ) as answer:
                        raw = bytearray()
                        async for piece in answer.content.iter_any():
                            raw += piece
                            if len(raw) > MAX_ANSWER:
                                raise _NoAnswerError(f"the answer is over {MAX_ANSWER} bytes")
                        pairs = [value.split(";", 1)[0] for value in answer.headers.getall("Set-Cookie", [])]
                        return answer.status, bytes(raw), "; ".join(pairs) or None
        except TimeoutError as error:
            raise _NoAnswerError(f"no answer within {timeout_s:g} s", over_request=True) from error
        except (aiohttp.ClientError, OSError) as error:
            raise _NoAnswerError(f"{type(error).__name__}: {error}") from error
        except asyncio.CancelledError as error:
            if self.closed:
                raise ServerUnreachableError(f"{server.url}{path}: the client was closed") from error
            raise

    async def some_ready(self, timeout_s: float) -> None:
        asked = {asyncio.ensure_future(self._ready(server, timeout_s)): server for server in self.servers.all}
        late = set(asked)
        try:
            with waiting(f"{self.base_url} to be ready", timeout_s):
                while late and not any(task.done() and task.exception() is None for task in asked):
                    _, late = await asyncio.wait(late, return_when=asyncio.FIRST_COMPLETED)
            if late:
                await asyncio.wait(late, timeout=READY_GRACE_S)
        finally:
            for task in asked:
                task.cancel()
        causes = [str(task.exception()) for task in asked if task.done() and task.exception() is not None]
        if len(causes) == len(asked):
            raise ServerUnreachableError("; ".join(causes))
        for task, server in asked.items():
            if not task.done() or task.exception() is not None:
                self.servers.lose(server, "not ready yet")

    async def _ready(self, server: Replica, timeout_s: float) -> None:
        """Return once one server is ready; ServerUnreachableError after timeout_s."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                status, raw, _ = await self._ask(server, "GET", self.ready_path, None, {}, min(5.0, timeout_s))
            except _NoAnswerError as error:
                cause = str(error)
            else:
                if status < 500:
                    return
                cause = f"HTTP {status}: {raw[:200]!r}"
            if time.monotonic() + 1.0 > deadline:
                where = f"{server.url}{self.ready_path}"
                raise ServerUnreachableError(f"{where} not ready after {timeout_s:g} s ({cause})")
            await asyncio.sleep(1.0)


class JsonClient:
    """A JSON client of one server, or of equal ones. Its thread and connections begin with the first request, so that
    one that is never used costs nothing, and end with the client at the latest.

    Args:
        ready_path: answers below 500 when a server is ready.
        timeout_s: of one attempt, which asks every server until one answers.
        retries: further attempts, on connection errors and RETRIED_STATUS.
        backoff_s: first pause between attempts; doubles, with jitter, up to 30 s.
        max_concurrency: requests in flight at once at each server; the others queue.
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
        self._retries = retries
        self._backoff_s = backoff_s
        self._starting = threading.Lock()
        sent = {"Accept": "application/json", **(headers or {})}
        self._held = _Held(self.base_urls, sent, ready_path, timeout_s, max_concurrency)
        weakref.finalize(self, self._held.end, wait=False)

    async def post(
        self, path: str, body: Any, *, cookies: str | None = None, headers: Mapping[str, str] | None = None
    ) -> tuple[Any, str | None]:
        """POST `body` as JSON. Returns the parsed answer and the cookies the server set ("a=b; c=d") or None.

        HttpStatusError: the server refused the request (3xx, 4xx), or its answer is nested too deep to be read.
        ServerUnreachableError: every attempt failed, or the answer was not JSON.
        """
        return await self._request("POST", path, json.dumps(body).encode(), cookies, headers or {})

    async def get(self, path: str) -> Any:
        """GET and parse JSON; errors as post."""
        return (await self._request("GET", path, None, None, {}))[0]

    def read(self, path: str) -> Any:
        """As get, for blocking callers."""
        return self._running().run(self.get(path))

    def wait_until_ready(self, timeout_s: float) -> None:
        """Poll `ready_path` once a second until it answers below 500. Of several servers one is enough: those that are
        not ready within READY_GRACE_S of the first are reported, and used as soon as they are."""
        self._running().run(self._held.some_ready(timeout_s))

    async def wait_ready(self, timeout_s: float) -> None:
        """As wait_until_ready, awaited: it ends when it is cancelled."""
        await self._running().answer(self._held.some_ready(timeout_s))

    def close(self) -> None:
        """Close the connections and end the thread. Requests in flight are broken off: ServerUnreachableError."""
        self._held.closed = True
        self._held.end(wait=True)

    def _running(self) -> LoopThread:
        """The thread where servers are to be asked."""
        if self._held.closed:
            raise ServerUnreachableError(f"{self.base_url}: the client is closed")
        with self._starting:
            if self._held.thread is None:
                self._held.thread = LoopThread("json-http")
            return self._held.thread

    async def _request(
        self, method: str, path: str, body: bytes | None, cookies: str | None, headers: Mapping[str, str]
    ) -> tuple[Any, str | None]:
        sent = {**headers, "Cookie": cookies} if cookies else headers
        cause, over_request = "", True
        for attempt in range(self._retries + 1):
            if attempt:
                pause = min(30.0, self._backoff_s * 2 ** (attempt - 1))
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            thread = self._running()
            try:
                status, raw, new_cookies = await thread.answer(self._held.any(method, path, body, sent))
            except _NoAnswerError as error:
                cause, over_request = str(error), over_request and error.over_request
                continue
            if status >= 300:
                raise HttpStatusError(status, raw.decode(errors="replace"))
            try:
                return json.loads(raw), new_cookies
            except ValueError:
                cause, over_request = f"answer is not JSON: {raw[:200]!r}", False
            except RecursionError as error:
                raise HttpStatusError(status, "the answer is nested too deep") from error
        message = f"{self.base_url}{path} failed {self._retries + 1} times ({cause})"
        if len(self.base_urls) > 1:
            message = f"none of {len(self.base_urls)} servers answers {path} ({cause})"
        raise ServerUnreachableError(message, over_request)


def _well_formed(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port beyond 65535, half of an IPv6 address
        return False
