"""Long waits are told: for what, how long so far and how long at most, whoever it is that does not answer."""

import asyncio
import fcntl
import logging
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from nemotron_steps import waiting as waits
from nemotron_steps.engine.rollouts.turns import call_with_timeout
from nemotron_steps.environments.http_client import JsonClient
from nemotron_steps.environments.judged.judges import HttpJudge
from nemotron_steps.errors import JudgeUnavailableError
from nemotron_steps.runs.locks import hold
from nemotron_steps.waiting import waiting


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(waits, "FIRST_S", 0.2)
    caplog.set_level(logging.WARNING, "nemotron_steps.waiting")


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a server that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def ask_judge(url: str, _: Path) -> None:
    judge = HttpJudge(f"{url}/v1", "m", timeout_s=1.0, retries=0)
    try:
        with pytest.raises(JudgeUnavailableError) as caught:
            asyncio.run(judge.complete([], temperature=1, top_p=1, max_tokens=1))
    finally:
        judge.close()
    assert caught.value.hints == (f"curl {url}/v1/models",)


def wait_until_ready(url: str, _: Path) -> None:
    client = JsonClient(url, ready_path="/health")
    with suppress(Exception):
        client.wait_until_ready(1.0)
    client.close()


def ask_environment(_: str, __: Path) -> None:
    asyncio.run(call_with_timeout("toy", "verify", asyncio.sleep(0.6)))


def take_lock(_: str, folder: Path) -> None:
    path = folder / "lock"
    path.write_text('{"pid": 7, "host": "there"}')
    with path.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        threading.Timer(0.8, lambda: fcntl.flock(held, fcntl.LOCK_UN)).start()
        with hold(path, {}, lambda _: None):
            pass


@pytest.mark.parametrize(
    ("wait", "says"),
    [
        (ask_judge, r"an answer from http://\S+/v1/chat/completions: \d s of at most 1 s"),
        (wait_until_ready, r"http://\S+ to be ready: \d s of at most 1 s"),
        (ask_environment, r"the environment `toy` \(verify\): \d s of at most 3600 s"),
        (take_lock, r"process 7 on there to let go of \S+/lock: \d s"),
    ],
)
def test_who_does_not_answer_is_told(
    wait: Callable[[str, Path], None], says: str, silent: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wait(silent, tmp_path)
    assert re.fullmatch(f"waiting for {says}", caplog.messages[0])


def test_an_interrupt_on_its_way_out_leaves_no_wait_behind() -> None:
    with suppress(KeyboardInterrupt):
        with waiting("it"):
            waits._lock.acquire()
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        time.sleep(5)
    waits._lock.release()
    assert not waits._under_way
