from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.environments.base import GraderFailedError
from nemotron_steps.environments.grading_pool import GradingPool
from nemotron_steps.environments.line_worker import (
    WorkerCrashedError,
    WorkerPool,
    WorkerTimeoutError,
)
from nemotron_steps.environments.text.math_with_judge import compare
from nemotron_steps.errors import WorkerLostError

MODULE = "tests.environments.line_worker_for_tests"


def with_pool(use: Callable[[WorkerPool], Awaitable[Any]], *, cpu_s: float = 20.0, size: int = 1) -> Any:
    async def run() -> Any:
        pool = WorkerPool(MODULE, size=size, cpu_s=cpu_s)
        try:
            return await use(pool)
        finally:
            await pool.close()

    return asyncio.run(run())


def workers_of(parent: int) -> list[int]:
    """Processes of the test's module that were started by one process."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (process / "cmdline").read_bytes().split(b"\0")
            if MODULE.encode() in words and str(parent).encode() in words:
                found.append(int(process.name))
    return found


def gone_within(seconds: float, parent: int) -> bool:
    until = time.monotonic() + seconds
    while workers_of(parent) and time.monotonic() < until:
        time.sleep(0.05)
    return not workers_of(parent)


def test_answers_come_back_whatever_the_worker_prints() -> None:
    async def use(pool: WorkerPool) -> list[Any]:
        return [await pool.call(request) for request in ("print", {"a": [1, "\ud800"]}, None)]

    assert with_pool(use) == ["print", {"a": [1, "\ud800"]}, None]


@pytest.mark.parametrize("request_", ["spin", "one long operation"])
def test_a_worker_that_takes_too_long_is_ended_by_the_kernel_and_the_next_call_answered(request_: str) -> None:
    async def use(pool: WorkerPool) -> Any:
        process = await pool._start()
        pool._free.append(process)
        with pytest.raises(WorkerTimeoutError, match="processor time"):
            await pool.call(request_)
        assert process.returncode == -signal.SIGPROF
        return await pool.call(2)

    assert with_pool(use, cpu_s=0.5) == 2
    assert gone_within(20, os.getpid())


def test_a_worker_that_sleeps_is_lost_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemotron_steps.environments.line_worker.WALL_FACTOR", 1)

    async def use(pool: WorkerPool) -> None:
        with pytest.raises(WorkerLostError, match="did not answer"):
            await pool.call("sleep")

    with_pool(use, cpu_s=0.5)
    assert gone_within(20, os.getpid())


@pytest.fixture
def slow_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module whose import takes two seconds."""
    (tmp_path / "slow_to_import.py").write_text("import time\ntime.sleep(2)\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    return "slow_to_import"


def test_what_a_worker_imports_takes_nothing_from_the_time_of_an_answer(slow_import: str) -> None:
    async def call() -> Any:
        pool = WorkerPool(MODULE, size=1, cpu_s=1.0, imports=[slow_import])
        try:
            return await pool.call(1)
        finally:
            await pool.close()

    assert asyncio.run(call()) == 1


def test_a_worker_that_does_not_start_is_lost_and_ended(slow_import: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemotron_steps.environments.line_worker.STARTING_S", 0.5)

    async def call(module: str) -> None:
        with pytest.raises(WorkerLostError) as caught:
            await WorkerPool(MODULE, size=1, cpu_s=20.0, imports=[module]).call(1)
        raise caught.value

    with pytest.raises(WorkerLostError, match="did not start"):
        asyncio.run(call(slow_import))
    assert workers_of(os.getpid()) == []
    monkeypatch.undo()
    with pytest.raises(WorkerLostError, match="died") as died:
        asyncio.run(call("no_such_module"))
    assert died.value.found == "exit code 1"


def test_a_call_that_nobody_waits_for_any_more_ends_its_worker() -> None:
    async def use(pool: WorkerPool) -> None:
        await pool.call(1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pool.call("sleep"), 0.1)
        assert pool._free == [] and gone_within(20, os.getpid())

    with_pool(use)


def test_a_worker_that_takes_too_much_memory_counts_as_too_long() -> None:
    async def use(pool: WorkerPool) -> Any:
        with pytest.raises(WorkerTimeoutError, match="memory"):
            await pool.call("grow")
        return await pool.call(2)

    assert with_pool(use, cpu_s=120.0) == 2


@pytest.mark.parametrize(
    ("request_", "raised", "code"),
    [("die", WorkerCrashedError, 7), ("crash", WorkerCrashedError, -11), ("be killed", WorkerLostError, -9)],
)
def test_a_worker_that_ends_itself_is_told_from_one_that_is_killed(
    request_: str, raised: type[Exception], code: int
) -> None:
    async def use(pool: WorkerPool) -> None:
        with pytest.raises(raised, match=f"exit code {code}"):
            await pool.call(request_)

    with_pool(use)


PARENT = f"""
import asyncio, sys
from nemotron_steps.environments.line_worker import WorkerPool

async def main():
    pool = WorkerPool("{MODULE}", size=2, cpu_s=600)
    await asyncio.gather(pool.call(1), pool.call(2))
    print("ready", flush=True)
    await asyncio.gather(pool.call(sys.argv[1]), pool.call("spin"))

asyncio.run(main())
"""


@pytest.mark.parametrize("request_", ["spin", "one long operation"])
def test_workers_die_with_a_parent_that_is_killed_in_the_middle_of_a_call(request_: str) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, request_], stdout=subprocess.PIPE)
    try:
        assert parent.stdout is not None and parent.stdout.readline() == b"ready\n"
        assert len(workers_of(parent.pid)) == 2
        time.sleep(0.3)  # both are at work
    finally:
        parent.kill()
        parent.communicate()
    assert gone_within(20, parent.pid)


@pytest.mark.parametrize(
    ("ends", "failure", "told"),
    [
        (WorkerTimeoutError("it took longer than 3 s"), "verifier_timeout", "longer than 3 s"),
        (WorkerCrashedError("exit code 7"), "verifier_crashed", "math_with_judge:compare: exit code 7"),
        ({"error": "KeyError"}, "verifier_crashed", "math_with_judge:compare: KeyError"),
    ],
)
def test_a_grader_that_does_not_end_or_dies_or_raises_is_a_failure_of_its_own(
    ends: Any, failure: str, told: str
) -> None:
    class Worker:
        async def call(self, request: Any) -> Any:
            if isinstance(ends, Exception):
                raise ends
            return ends

    pool: Any = GradingPool(compare)
    pool._workers = Worker()
    with pytest.raises(GraderFailedError, match=told) as caught:
        asyncio.run(pool.call("1", "2"))
    assert caught.value.failure == failure
