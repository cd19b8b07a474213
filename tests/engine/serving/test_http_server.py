"""The HTTP server and the sampler beneath the endpoint, where clients and loops misbehave."""

import asyncio
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nemotron_steps.environments import http_server
from nemotron_steps.environments.base import Environment, EnvironmentConfig, GradeResult, Response, Row, Session
from nemotron_steps.environments.http_server import HttpServer, Reply, Request
from nemotron_steps.environments.loop_thread import LoopThread
from nemotron_steps.environments.remote.serving import EnvironmentServer
from tests.engine.serving.test_chat_api import call

LINES = st.sampled_from(
    [
        b"GET /health HTTP/1.1\r\n",
        b"Host: localhost\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"POST /v1/responses HTTP/1.1\r\n",
        b"Content-Length: 5\r\n",
        b"\r\n",
        b"{}",
        b"\x00",
    ]
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(LINES | st.binary(max_size=12), max_size=6))
def test_no_bytes_bring_the_server_down(endpoint, pieces):
    parts = urlsplit(endpoint.url)
    with socket.create_connection((parts.hostname, parts.port), timeout=10) as connection:
        connection.sendall(b"".join(pieces))
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(4096):
            pass
    assert call(endpoint, "/health")[0] == 200


SLOW_S = 1.2
"""An answer takes longer than what the tests grant for a request."""


class Slow(Environment):
    name: ClassVar[str] = "slow"

    async def call_tool(self, session: Session, name: str, arguments: dict[str, Any]) -> str:
        raise NotImplementedError

    async def verify(self, row: Row, response: Response, session: Session) -> GradeResult:
        await asyncio.sleep(SLOW_S)
        return GradeResult(1.0)


@contextmanager
def environment_server() -> Iterator[str]:
    with EnvironmentServer(Slow(EnvironmentConfig(), {})) as server:
        yield server.url


@contextmanager
def endpoint_server() -> Iterator[str]:
    async def answer(request: Request) -> Reply:
        if request.path == "/verify":
            await asyncio.sleep(SLOW_S)
        return Reply(200, {})

    server = HttpServer(answer)
    thread = LoopThread("server")
    thread.run(server.start())
    try:
        yield server.url
    finally:
        thread.run(server.stop())
        thread.stop()


both = pytest.mark.parametrize("serve", [endpoint_server, environment_server])


def connect(url: str) -> socket.socket:
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname, parts.port), timeout=10)


def received(connection: socket.socket) -> bytes:
    """All that comes until the server closes."""
    data = b""
    try:
        while piece := connection.recv(4096):
            data += piece
    except ConnectionResetError:
        pass
    return data


def ask(url: str, *headers: str, path: str = "/health", body: bytes = b"") -> bytes:
    """The answer to a request with these headers, by default one to localhost."""
    lines = [f"{'POST' if body else 'GET'} {path} HTTP/1.1", "Connection: close", *(headers or ["Host: localhost"])]
    lines += [f"Content-Length: {len(body)}"] if body else []
    with connect(url) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
        return received(connection)


@both
@pytest.mark.parametrize(
    "begun", [b"", b"GET /hea", b"POST /verify HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{"]
)
def test_a_connection_that_brings_no_whole_request_is_closed(serve, begun, monkeypatch):
    monkeypatch.setattr(http_server, "IDLE_S", 0.3)
    monkeypatch.setattr(http_server, "READ_S", 0.3)
    with serve() as url, connect(url) as connection:
        connection.sendall(begun)
        assert b" 200 " not in received(connection)  # TimeoutError after 10 s if it were kept


@both
@pytest.mark.parametrize(
    "begun", [b"GET /", b"POST /verify HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5000\r\n\r\n"]
)
def test_a_client_that_drips_bytes_gains_no_time(serve, begun, monkeypatch):
    monkeypatch.setattr(http_server, "IDLE_S", 0.5)
    monkeypatch.setattr(http_server, "READ_S", 0.5)
    with serve() as url, connect(url) as connection:
        connection.sendall(begun)
        deadline = time.monotonic() + 10
        with pytest.raises(ConnectionError):
            while time.monotonic() < deadline:
                connection.sendall(b"x")
                time.sleep(0.05)


@both
def test_an_answer_may_take_longer_than_a_request(serve, monkeypatch):
    monkeypatch.setattr(http_server, "IDLE_S", SLOW_S / 3)
    monkeypatch.setattr(http_server, "READ_S", SLOW_S / 3)
    body = b'{"responses_create_params": {"input": "x"}, "response": {"output": []}}'
    with serve() as url:
        assert b" 200 OK" in ask(url, path="/verify", body=body)


@both
def test_a_connection_over_the_bound_is_refused_until_one_closes(serve, monkeypatch):
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", 3)
    with serve() as url, ExitStack() as held:
        first, *_ = [held.enter_context(connect(url)) for _ in range(3)]
        for _ in range(5):
            with connect(url) as refused:
                assert received(refused).startswith(b"HTTP/1.1 503 ")
        first.close()
        deadline = time.monotonic() + 10
        while b" 200 OK" not in (answer := ask(url)):
            assert b" 503 " in answer or not answer
            assert time.monotonic() < deadline
            time.sleep(0.02)


CLIENTS = """
import resource, socket, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
held = []
for _ in range(int(sys.argv[2])):
    held.append(socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=10))
print("open", flush=True)
sys.stdin.read()
"""


@both
def test_half_open_connections_leave_descriptors_for_files(serve, tmp_path: Path):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = len(list(Path("/proc/self/fd").iterdir())) * 2 + 200
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        with serve() as url:
            command = [sys.executable, "-c", CLIENTS, str(urlsplit(url).port), str(limit + 50)]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as clients:
                assert clients.stdout.readline() == "open\n"
                for number in range(20):
                    (tmp_path / str(number)).write_text("kept")
                    time.sleep(0.01)
                clients.stdin.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@both
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (["Host: localhost:{port}"], 200),
        (["Host: 127.0.0.1:{port}"], 200),
        (["Host: [::1]:{port}"], 200),
        (["Host: " + socket.gethostname()], 200),
        (["Host: localhost:{port}", "Origin: http://localhost:{port}"], 200),
        (["Host: rebound.example:{port}"], 421),
        (["Host: localhost.rebound.example"], 421),
        (["Host: [::1"], 421),
        (["Host: "], 421),
        (["Host: localhost:{port}", "Origin: http://page.example"], 403),
        (["Host: localhost:{port}", "Origin: http://localhost:1"], 403),
        (["Host: localhost:{port}", "Origin: null"], 403),
        (["Accept: */*"], 400),
    ],
)
def test_web_pages_are_kept_out(serve, headers, status):
    with serve() as url:
        given = [header.format(port=urlsplit(url).port) for header in headers]
        assert int(ask(url, *given).split()[1]) == status
        posted = ask(url, *given, path="/seed_session", body=b'{"responses_create_params": {"input": "x"}}')
        assert int(posted.split()[1]) == status


@both
@pytest.mark.parametrize("length", ["-1", "x", "9" * 5000, str(65 * 1024 * 1024)])
def test_a_body_of_no_or_too_great_a_length_is_refused(serve, length):
    with serve() as url, connect(url) as connection:
        connection.sendall(f"POST /verify HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n".encode())
        assert int(received(connection).split()[1]) in (400, 413, 501)
