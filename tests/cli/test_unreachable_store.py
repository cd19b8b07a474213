"""A home on a server that does not answer: a storage error, worth trying again, without what must stay secret."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("s3fs")

HOME = "s3://bucket/home"
SECRETS = ("AKIAUNREACHABLE000001", "unreachable-secret-key", "endpoint-password")
Reach = Callable[[str], None]


@pytest.fixture
def reach(monkeypatch: pytest.MonkeyPatch) -> Reach:
    """Make S3 the server at an address."""
    import fsspec
    import s3fs

    def at(address: str) -> None:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", SECRETS[0])
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRETS[1])
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{address}")
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
        fsspec.config.conf.clear()
        s3fs.S3FileSystem.clear_instance_cache()

    return at


@pytest.fixture
def answering(reach: Reach) -> Iterator[Callable[[int, str], None]]:
    """Make S3 a server that answers everything with one status and S3 error code."""
    servers: list[ThreadingHTTPServer] = []

    def answer(status: int, code: str) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments: object) -> None:
                pass

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[0].serve_forever, daemon=True).start()
        reach(f"127.0.0.1:{servers[0].server_port}")

    yield answer
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    "command", [("artifacts", "list"), ("runs",), ("run", "toy/train", "-c", "tiny"), ("artifacts", "verify", "--json")]
)
def test_a_server_that_is_not_there_is_a_storage_error_worth_another_try(cli, reach, command):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    reach(f"someone:{SECRETS[2]}@127.0.0.1:{port}")
    result = cli(*command, "--home", HOME)
    said = result.out + result.err
    assert result.code == 3
    assert "E720" in said and "the store cannot be reached" in said and HOME in said
    assert "Traceback" not in said
    assert [secret for secret in SECRETS if secret in said] == []


@pytest.mark.parametrize(
    ("status", "code", "exit_code", "error"),
    [(500, "InternalError", 3, "E720"), (503, "ServiceUnavailable", 3, "E720"), (403, "AccessDenied", 1, "E610")],
)
def test_a_server_in_trouble_is_worth_another_try_and_one_that_refuses_is_not(
    cli, answering, status, code, exit_code, error
):
    answering(status, code)
    result = cli("runs", "--home", HOME)
    assert result.code == exit_code and error in result.err
    assert "Traceback" not in result.err and [secret for secret in SECRETS if secret in result.err] == []
