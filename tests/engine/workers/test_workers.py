"""What is said of workers, without Ray."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nemotron_steps.engine.workers import workers as module
from nemotron_steps.engine.workers.workers import (
    WorkerProcess,
    answer,
    result_of,
    settle,
    start_workers,
    stop_workers,
)
from nemotron_steps.errors import DataError, EngineError, WorkerLostError

CHILD = "from nemotron_steps.engine.workers.workers import end_with_parent; end_with_parent(); import os, time\n"
CHILD += "print(os.getpid(), flush=True); time.sleep(60)"
PARENT = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {CHILD!r}]); time.sleep(60)"


def test_a_child_is_killed_with_its_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE)
    try:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        os.kill(child, 0)
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.communicate()
    status = Path(f"/proc/{child}/stat")
    until = time.monotonic() + 20
    while status.exists() and status.read_text().rpartition(")")[2].split()[0] not in "ZX" and time.monotonic() < until:
        time.sleep(0.01)
    assert time.monotonic() < until


pytestmark = pytest.mark.ray


class Sleeper(WorkerProcess):
    async def block(self, seconds: float) -> str:
        """Hold the event loop, as a grader may."""
        time.sleep(seconds)
        return "done"

    async def refuse(self) -> None:
        raise DataError("a bad row", where="rows.jsonl:3", hints=["fix it"])

    async def fail(self) -> None:
        print("about to fail", flush=True)
        raise ZeroDivisionError("nothing to divide by")

    async def leave(self) -> None:
        print("leaving", flush=True)
        os._exit(7)


@pytest.fixture
def worker(cluster, monkeypatch):
    monkeypatch.setattr(module, "PING_SECONDS", 0.2)
    monkeypatch.setattr(module, "SILENT_SECONDS", 2.0)
    started = start_workers(Sleeper, ["sleeper"], [{"num_cpus": 0}], device=False)
    yield started[0]
    stop_workers(started)


def test_errors_arrive_as_what_they_are(worker):
    with pytest.raises(DataError) as caught:
        result_of(worker.call("refuse"), worker)
    assert caught.value.where == "rows.jsonl:3" and caught.value.hints == ("fix it",)
    assert type(caught.value) is DataError
    with pytest.raises(EngineError, match="`sleeper` failed") as failed:
        settle({worker.call("fail"): worker})
    assert "ZeroDivisionError: nothing to divide by" in failed.value.found and "in fail" in failed.value.found
    with pytest.raises(WorkerLostError, match="`sleeper` is lost") as gone:
        result_of(worker.call("leave"), worker)
    assert "leaving" in gone.value.found  # its last log line
    with pytest.raises(WorkerLostError):  # for good: another in its place would know nothing of what this one did
        result_of(worker.call("ping"), worker)


def test_a_busy_worker_is_waited_for_and_a_stopped_one_is_not(worker):
    assert asyncio.run(awaited(worker, "block", 2.5)) == "done"  # longer than pings are waited for
    assert settle({worker.call("block", 2.5): worker}) == ["done"]
    os.kill(worker.pid, signal.SIGSTOP)
    for wait in (lambda: asyncio.run(awaited(worker, "block", 0.0)), lambda: settle({worker.call("ping"): worker})):
        started = time.monotonic()
        with pytest.raises(WorkerLostError, match="`sleeper` is lost"):
            wait()
        assert time.monotonic() - started < 30


async def awaited(worker, method, *arguments):
    return await answer(worker.call(method, *arguments), worker)
