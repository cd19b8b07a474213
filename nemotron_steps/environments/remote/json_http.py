"""JSON over HTTP with bounded retries, for judges and remote environments.

Standard library only. Blocking requests run on this client's own threads, so many can wait at once without blocking
the event loop. Not for streaming, and proxies from the process environment are ignored on purpose: judges and
environment servers live on the cluster's own network.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import socket
import ssl
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from nemotron_steps.errors import ConfigError

RETRIED_STATUS = frozenset({408, 409, 425, 429, 500, 502, 503, 504})


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
        self._secure = parts.scheme == "https"
        self._host = parts.hostname
        self._port = parts.port or (443 if self._secure else 80)
        self._prefix = parts.path.rstrip("/")
        self._headers = {"Accept": "application/json", **(headers or {})}
        self._timeout_s = timeout_s
        self._retries = retries
        self._backoff_s = backoff_s
        self._pool = ThreadPoolExecutor(max_concurrency, thread_name_prefix="json-http")
        self._connections: set[http.client.HTTPConnection] = set()

    async def post(
        self, path: str, body: Any, *, cookies: str | None = None, headers: Mapping[str, str] | None = None
    ) -> tuple[Any, str | None]:
        """POST `body` as JSON. Returns the parsed answer and the cookies the server set ("a=b; c=d") or None.

        Args:
            cookies: to send, in the form they are returned in.
            headers: of this request, besides the client's own.

        Raises:
            HttpStatusError: the server refused the request (4xx).
            ServerUnreachableError: every attempt failed, or the answer was not JSON.
        """
        return await self._request("POST", path, json.dumps(body).encode(), cookies, headers or {})

    async def get(self, path: str) -> Any:
        """GET and parse JSON; errors as post."""
        return (await self._request("GET", path, None, None, {}))[0]

    async def wait_ready(self, path: str, timeout_s: float) -> None:
        """As wait_until_ready, without blocking the event loop."""
        await asyncio.get_running_loop().run_in_executor(self._pool, self.wait_until_ready, path, timeout_s)

    def wait_until_ready(self, path: str, timeout_s: float) -> None:
        """Poll `path` once a second until it answers below 500.

        Raises:
            ServerUnreachableError: nothing answered within timeout_s.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                status, body, _ = self._once("GET", path, None, {}, min(5.0, timeout_s))
            except (OSError, http.client.HTTPException) as error:
                cause = repr(error)
            else:
                if status < 500:
                    return
                cause = f"HTTP {status}: {body[:200]!r}"
            if time.monotonic() + 1.0 > deadline:
                raise ServerUnreachableError(f"{self.base_url}{path} not ready after {timeout_s:g} s ({cause})")
            time.sleep(1.0)

    def close(self) -> None:
        """Stop the threads. Requests in flight are broken off: Python waits for their threads when it exits."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for connection in list(self._connections):
            if (sock := connection.sock) is not None:
                with suppress(OSError):  # the other side was faster
                    sock.shutdown(socket.SHUT_RDWR)

    async def _request(
        self, method: str, path: str, body: bytes | None, cookies: str | None, headers: Mapping[str, str]
    ) -> tuple[Any, str | None]:
        loop = asyncio.get_running_loop()
        sent = {**headers, "Cookie": cookies} if cookies else headers
        cause = ""
        for attempt in range(self._retries + 1):
            if attempt:
                pause = min(30.0, self._backoff_s * 2 ** (attempt - 1))
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            try:
                status, raw, new_cookies = await loop.run_in_executor(
                    self._pool, self._once, method, path, body, sent, self._timeout_s
                )
            except (OSError, http.client.HTTPException) as error:
                cause = repr(error)
                continue
            if status in RETRIED_STATUS:
                cause = f"HTTP {status}: {raw[:200]!r}"
                continue
            if status >= 400:
                raise HttpStatusError(status, raw.decode(errors="replace"))
            try:
                return json.loads(raw), new_cookies
            except ValueError:
                cause = f"answer is not JSON: {raw[:200]!r}"
        raise ServerUnreachableError(f"{self.base_url}{path} failed {self._retries + 1} times ({cause})")

    def _once(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str], timeout_s: float
    ) -> tuple[int, bytes, str | None]:
        connection: http.client.HTTPConnection
        if self._secure:
            context = ssl.create_default_context()
            connection = http.client.HTTPSConnection(self._host, self._port, timeout=timeout_s, context=context)
        else:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
        sent = {**self._headers, **headers}
        if body is not None:
            sent["Content-Type"] = "application/json"
        self._connections.add(connection)
        try:
            connection.request(method, self._prefix + path, body, sent)
            response = connection.getresponse()
            raw = response.read()
            pairs = [value.split(";", 1)[0] for value in response.headers.get_all("Set-Cookie") or []]
            return response.status, raw, "; ".join(pairs) or None
        finally:
            self._connections.discard(connection)
            connection.close()
