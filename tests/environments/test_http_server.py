"""What a handler is given, and what is left of a server that has stopped."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from nemotron_steps.environments.http_server import HttpServer, Reply, Request
from nemotron_steps.environments.loop_thread import LoopThread


async def answered(reader: asyncio.StreamReader) -> bytes:
    """The body of one answer."""
    head = await reader.readuntil(b"\r\n\r\n")
    (length,) = (line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    return await reader.readexactly(int(length))


def test_a_server_that_stops_closes_every_connection_and_cancels_what_still_runs() -> None:
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def answer(request: Request) -> Reply:
        if request.path == "/wait":
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()
        return Reply(200, {})

    async def body() -> None:
        server = HttpServer(answer)
        await server.start()
        host, port = server.url.removeprefix("http://").split(":")
        connections = [await asyncio.open_connection(host, int(port)) for _ in range(2)]
        for (_, writer), path in zip(connections, ("/", "/wait"), strict=True):
            writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
        await answered(connections[0][0])  # open for another request
        await asyncio.wait_for(begun.wait(), 10)
        await asyncio.wait_for(server.stop(), 10)
        assert cancelled.is_set()
        for reader, writer in connections:
            assert await asyncio.wait_for(reader.read(), 10) == b""
            writer.close()
        try:
            await asyncio.open_connection(host, int(port))
        except ConnectionRefusedError:
            return
        raise AssertionError("the port is still open")

    asyncio.run(body())


@pytest.mark.parametrize("soon", [False, True])
def test_what_still_runs_is_cancelled_before_the_last_word_and_the_thread_ends(soon: bool) -> None:
    done: list[str] = []
    over = threading.Event()

    async def numbers() -> AsyncIterator[int]:
        try:
            for number in range(9):
                yield number
        finally:
            done.append("generator")
            over.set()

    left = numbers()

    async def begin() -> asyncio.Task[None]:
        async def work() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                done.append("cancelled")

        await anext(left)
        task = asyncio.ensure_future(work())
        await asyncio.sleep(0)
        return task

    async def last() -> None:
        await asyncio.sleep(0)
        done.append("last")

    thread = LoopThread("kept")
    task = thread.run(begin())
    (thread.stop_soon if soon else thread.stop)(last)
    assert over.wait(10)
    thread._thread.join(10)
    assert done == ["cancelled", "last", "generator"] and task.cancelled()
    assert not thread._thread.is_alive() and thread.loop.is_closed()
