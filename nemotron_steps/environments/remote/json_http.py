"""JSON over HTTP on aiohttp with bounded retries, for judges and remote environments.

A client has an event loop in a thread of its own, so that it serves whatever loop asks, blocking callers too, and keeps
its connections between them. Not for streaming, and proxies from the process environment are ignored on purpose: judges
and environment servers live on the cluster's own network.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from nemotron_steps.environments.loop_thread import LoopThread
from nemotron_steps.errors import ConfigError

if TYPE_CHECKING:
    import aiohttp

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
    """No usable answer within the retries; carries the last cause."""


class JsonClient:
    """A JSON client of one server.

    Args:
        base_url: http(s) URL; paths are appended to it.
        headers: sent with every request (authorization).
        timeout_s: of one attempt.
        retries: further attempts after the first, on connection errors and RETRIED_STATUS.
        backoff_s: first pause between attempts; doubles, with jitter, up to 30 s.
        max_concurrency: requests in flight at once; the others queue.
    """

    def __init__(
        self,
        base_url: str,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 600.0,
        retries: int = 3,
        backoff_s: float = 0.5,
        max_concurrency: int = 64,
    ) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError("a server URL is malformed", expected="http://HOST:PORT or https://HOST", found=base_url)
        self.base_url = base_url.rstrip("/")
        self._timeout_s = timeout_s
        self._retries = retries
        self._backoff_s = backoff_s
        self._line = _Line(self.base_url, {"Accept": "application/json", **(headers or {})}, max_concurrency)
        weakref.finalize(self, self._line.close, wait=False)

    async def post(
        self, path: str, body: Any, *, cookies: str | None = None, headers: Mapping[str, str] | None = None
    ) -> tuple[Any, str | None]:
        """POST `body` as JSON. Returns the parsed answer and the cookies the server set ("a=b; c=d") or None.

        Args:
            cookies: to send, in the form they are returned in.
            headers: of this request, besides the client's own.

        Raises:
            HttpStatusError: the server refused the request (3xx, 4xx).
            ServerUnreachableError: every attempt failed, or the answer was not JSON.
        """
        return await self._request("POST", path, json.dumps(body).encode(), cookies, headers or {})

    async def get(self, path: str) -> Any:
        """GET and parse JSON; errors as post."""
        return (await self._request("GET", path, None, None, {}))[0]

    async def wait_ready(self, path: str, timeout_s: float) -> None:
        """As wait_until_ready, without blocking the event loop."""
        thread = self._line.thread()
        await thread.answer(self._line.ready(path, timeout_s))

    def wait_until_ready(self, path: str, timeout_s: float) -> None:
        """Poll `path` once a second until it answers below 500.

        Raises:
            ServerUnreachableError: nothing answered within timeout_s.
        """
        thread = self._line.thread()
        thread.run(self._line.ready(path, timeout_s))

    def close(self) -> None:
        """Close the connections. Requests in flight are broken off: ServerUnreachableError."""
        self._line.close()

    async def _request(
        self, method: str, path: str, body: bytes | None, cookies: str | None, headers: Mapping[str, str]
    ) -> tuple[Any, str | None]:
        sent = {**headers, "Cookie": cookies} if cookies else headers
        cause = ""
        for attempt in range(self._retries + 1):
            if attempt:
                pause = min(30.0, self._backoff_s * 2 ** (attempt - 1))
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            thread = self._line.thread()
            try:
                status, raw, new_cookies = await thread.answer(
                    self._line.ask(method, path, body, sent, self._timeout_s)
                )
            except _NoAnswerError as error:
                cause = str(error)
                continue
            if status in RETRIED_STATUS:
                cause = f"HTTP {status}: {raw[:200]!r}"
                continue
            if status >= 300:
                raise HttpStatusError(status, raw.decode(errors="replace"))
            try:
                return json.loads(raw), new_cookies
            except ValueError:
                cause = f"answer is not JSON: {raw[:200]!r}"
        raise ServerUnreachableError(f"{self.base_url}{path} failed {self._retries + 1} times ({cause})")


class _NoAnswerError(Exception):
    """One attempt brought no answer; says why."""


class _Line:
    """The connections to one server. They begin with the first request, so that a client that is never used costs
    nothing, and end with the client at the latest."""

    def __init__(self, base_url: str, headers: Mapping[str, str], max_concurrency: int) -> None:
        self._base_url = base_url
        self._headers = headers
        self._free = asyncio.Semaphore(max_concurrency)
        self._starting = threading.Lock()
        self._thread: LoopThread | None = None
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    def thread(self) -> LoopThread:
        """Where `ask` is to be awaited."""
        if self._closed:
            raise ServerUnreachableError(f"{self._base_url}: the client is closed")
        with self._starting:
            if self._thread is None:
                self._thread = LoopThread("json-http")
            return self._thread

    async def ask(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str], timeout_s: float
    ) -> tuple[int, bytes, str | None]:
        """Status, body and new cookies of one answer. _NoAnswerError when there is none."""
        import aiohttp
        from yarl import URL

        sent = {**headers, "Content-Type": "application/json"} if body is not None else headers
        url = URL(self._base_url + path, encoded=True)
        try:
            async with (
                self._free,
                self._open().request(
                    method,
                    url,
                    data=body,
                    headers=sent,
                    allow_redirects=False,
                    timeout=aiohttp.ClientTimeout(total=timeout_s),
                ) as answer,
            ):
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
            raise _NoAnswerError(repr(error)) from error
        except asyncio.CancelledError as error:
            if self._closed:
                raise ServerUnreachableError(f"{self._base_url}{path}: the client was closed") from error
            raise

    async def ready(self, path: str, timeout_s: float) -> None:
        """See JsonClient.wait_until_ready."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                status, raw, _ = await self.ask("GET", path, None, {}, min(5.0, timeout_s))
            except _NoAnswerError as error:
                cause = str(error)
            else:
                if status < 500:
                    return
                cause = f"HTTP {status}: {raw[:200]!r}"
            if time.monotonic() + 1.0 > deadline:
                raise ServerUnreachableError(f"{self._base_url}{path} not ready after {timeout_s:g} s ({cause})")
            await asyncio.sleep(1.0)

    def close(self, *, wait: bool = True) -> None:
        """Break off what is under way and end the thread."""
        self._closed = True
        thread, self._thread = self._thread, None
        if thread is not None and wait:
            thread.stop(self._end)
        elif thread is not None:
            thread.stop_soon(self._end)

    def _open(self) -> aiohttp.ClientSession:
        import aiohttp

        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=self._headers,
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
                cookie_jar=aiohttp.DummyCookieJar(),  # sessions are the callers'
            )
        return self._session

    async def _end(self) -> None:
        if self._session is not None:
            await self._session.close()
