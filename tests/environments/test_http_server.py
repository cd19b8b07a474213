"""What a handler is given, and what is left of a server that has stopped."""

import asyncio

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


def test_a_client_that_asks_before_it_sends_a_body_is_told_to_send_it() -> None:
    async def answer(request: Request) -> Reply:
        return Reply(200, {"size": len(request.body)})

    async def body() -> None:
        server = HttpServer(answer)
        await server.start()
        host, port = server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST / HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n"
        writer.write(head.encode())
        told = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
        assert told == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"abc")
        assert await asyncio.wait_for(answered(reader), 10) == b'{"size": 3}'
        writer.close()
        await server.stop()

    asyncio.run(body())


def test_a_loops_last_word_is_said_before_its_thread_ends() -> None:
    said = []

    async def last() -> None:
        said.append("last")

    LoopThread("kept").stop(last)
    assert said == ["last"]
