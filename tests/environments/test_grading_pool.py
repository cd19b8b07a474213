import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemotron_steps.environments import grading_pool
from nemotron_steps.environments.base import GraderFailedError
from nemotron_steps.environments.grading_pool import GradingPool
from nemotron_steps.errors import WorkerLostError
from tests.environments.slow_graders import answer


def with_pool(use: Callable[[GradingPool], Awaitable[Any]], *, cpu_s: float = 20.0, grade: Any = answer) -> Any:
    async def run() -> Any:
        pool = GradingPool(grade, size=1, cpu_s=cpu_s)
        try:
            return await use(pool)
        finally:
            await pool.close()

    return asyncio.run(run())


def helpers_of(parent: int) -> list[int]:
    """Helper processes that were started by one process."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (process / "cmdline").read_bytes().split(b"\0")
            if b"nemotron_steps.environments.grading_pool" in words and str(parent).encode() in words:
                found.append(int(process.name))
    return found


@pytest.fixture(autouse=True)
def others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Helpers that other tests of this process hold are not looked at."""
    held, all_of = helpers_of(os.getpid()), helpers_of
    monkeypatch.setitem(globals(), "helpers_of", lambda parent: [pid for pid in all_of(parent) if pid not in held])


def gone_within(seconds: float, parent: int) -> bool:
    until = time.monotonic() + seconds
    while helpers_of(parent) and time.monotonic() < until:
        time.sleep(0.05)
    return not helpers_of(parent)


@pytest.mark.parametrize("request_", ["spin", "one long operation"])
def test_a_helper_that_takes_too_long_is_ended_by_the_kernel_and_the_next_call_answered(request_: str) -> None:
    async def use(pool: GradingPool) -> Any:
        process = await pool._start()
        pool._free.append(process)
        with pytest.raises(GraderFailedError, match="processor time") as caught:
            await pool.call(request_)
        assert process.returncode == -signal.SIGPROF and caught.value.failure == "verifier_timeout"
        return await pool.call(2)

    assert with_pool(use, cpu_s=0.5) == 2
    assert gone_within(20, os.getpid())


def test_a_helper_that_sleeps_is_lost_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grading_pool, "WALL_FACTOR", 1)

    async def use(pool: GradingPool) -> None:
        with pytest.raises(WorkerLostError, match="did not answer"):
            await pool.call("sleep")

    with_pool(use, cpu_s=0.5)
    assert gone_within(20, os.getpid())


@pytest.fixture
def slow_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A grader whose module's import takes two seconds."""
    (tmp_path / "slow_to_import.py").write_text("import time\ntime.sleep(2)\ndef same(value): return value\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    return SimpleNamespace(__module__="slow_to_import", __qualname__="same")


def test_what_a_helper_imports_takes_nothing_from_the_time_of_a_call(slow_import: Any) -> None:
    assert with_pool(lambda pool: pool.call(1), cpu_s=1.0, grade=slow_import) == 1


def test_a_helper_that_does_not_start_is_lost_and_ended(slow_import: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grading_pool, "STARTING_S", 0.5)
    with pytest.raises(WorkerLostError, match="did not start"):
        with_pool(lambda pool: pool.call(1), grade=slow_import)
    assert helpers_of(os.getpid()) == []
    monkeypatch.undo()
    absent = SimpleNamespace(__module__="no_such_module", __qualname__="same")
    with pytest.raises(WorkerLostError, match="died") as died:
        with_pool(lambda pool: pool.call(1), grade=absent)
    assert died.value.found == "exit code 1"


def test_a_call_that_nobody_waits_for_any_more_ends_its_helper() -> None:
    async def use(pool: GradingPool) -> None:
        await pool.call(1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pool.call("sleep"), 0.1)
        assert pool._free == [] and gone_within(20, os.getpid())

    with_pool(use)


@pytest.mark.parametrize(
    ("request_", "failure", "told"), [("grow", "verifier_timeout", "memory$"), ("raise", "verifier_crashed", "gold")]
)
def test_a_grader_that_takes_too_much_memory_or_raises_fails_its_own_call(
    request_: str, failure: str, told: str
) -> None:
    async def use(pool: GradingPool) -> Any:
        with pytest.raises(GraderFailedError, match=told) as caught:
            await pool.call(request_)
        assert caught.value.failure == failure
        return await pool.call(2)

    assert with_pool(use, cpu_s=120.0) == 2


@pytest.mark.parametrize(
    ("request_", "raised", "code"),
    [("die", GraderFailedError, 7), ("crash", GraderFailedError, -11), ("be killed", WorkerLostError, -9)],
)
def test_a_helper_that_ends_itself_is_told_from_one_that_is_killed(
    request_: str, raised: type[Exception], code: int
) -> None:
    async def use(pool: GradingPool) -> None:
        with pytest.raises(raised, match=f"exit code {code}"):
            await pool.call(request_)

    with_pool(use)


PARENT = """
import asyncio, sys
from nemotron_steps.environments.grading_pool import GradingPool
from tests.environments.slow_graders import answer

async def main():
    pool = GradingPool(answer, size=2, cpu_s=600)
    await asyncio.gather(pool.call(1), pool.call(2))
    print("ready", flush=True)
    await asyncio.gather(pool.call(sys.argv[1]), pool.call("spin"))

asyncio.run(main())
"""


@pytest.mark.parametrize("request_", ["spin", "one long operation"])
def test_helpers_die_with_a_parent_that_is_killed_in_the_middle_of_a_call(request_: str) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, request_], stdout=subprocess.PIPE)
    try:
        assert parent.stdout is not None and parent.stdout.readline() == b"ready\n"
        assert len(helpers_of(parent.pid)) == 2
        time.sleep(0.3)  # both are at work
    finally:
        parent.kill()
        parent.communicate()
    assert gone_within(20, parent.pid)
