"""Handlers on a port, as tests ask them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nemotron_steps.environments.http_server import HttpServer
from nemotron_steps.environments.loop_thread import LoopThread


@contextmanager
def serving(handler: Any) -> Iterator[HttpServer]:
    server, thread = HttpServer(handler), LoopThread("test-server")
    thread.run(server.start())
    try:
        yield server
    finally:
        thread.run(server.stop())
        thread.stop()
