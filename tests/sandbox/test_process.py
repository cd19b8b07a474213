"""Running a process under a clock and an output limit, without a sandbox around it."""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.sandbox import Outcome, process
from nemotron_steps.sandbox.process import Ended, run_process


def ended(code: str, stdin: bytes = b"", *, wall_s: float = 30, output_bytes: int = 10_000_000, **more: Any) -> Ended:
    program = [sys.executable, "-I", "-S", "-c", f"import os, sys, time\n{code}"]
    return asyncio.run(run_process(program, stdin, wall_s=wall_s, output_bytes=output_bytes, **more))


def test_a_run_that_cannot_begin_says_why_and_leaves_no_descriptor_open() -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        asyncio.run(run_process(["/no-such-program"], b"", wall_s=1, output_bytes=10))
    assert ended("pass").exit_code == 0
    assert descriptors() == before


def test_the_clock_ends_a_program_with_all_that_it_started() -> None:
    begun = time.monotonic()
    found = ended("child = os.fork()\nif child: print(child, flush=True)\ntime.sleep(60)", wall_s=0.5)
    assert found.outcome is Outcome.TIMEOUT and found.exit_code == -signal.SIGKILL
    assert 0.5 <= found.wall_s <= time.monotonic() - begun < 30
    result = found.result()
    assert (result.outcome, result.exit_code, result.wall_s) == (Outcome.TIMEOUT, None, found.wall_s)
    child = Path(f"/proc/{found.stdout.strip()}/stat")
    until = time.monotonic() + 20  # whoever inherits it may take a while to bury it
    while child.exists() and child.read_text().rpartition(")")[2].split()[0] not in "ZX" and time.monotonic() < until:
        time.sleep(0.01)
    assert time.monotonic() < until


def watched(code: str, *, memory_bytes: int | None = None, wall_s: float = 30) -> Ended:
    """A program that is told a channel, `say`, on which a launcher says that it is ready."""
    reading, writing = os.pipe()
    try:
        watch = process.Watch(reading, memory_bytes, ())
        code = f"say = lambda text: os.write({writing}, text)\n{code}"
        return ended(code, wall_s=wall_s, pass_fds=(writing,), watch=watch)
    finally:
        os.close(reading)
        os.close(writing)


def test_a_run_is_ready_once_its_launcher_has_said_so_in_however_many_pieces() -> None:
    found = watched("say(b'rea'); time.sleep(0.1); say(b'dy\\n'); print('x')")
    assert (found.outcome, found.ready, found.stdout) == (Outcome.EXITED, True, "x\n")
    for code in (
        "sys.exit(3)",
        "say(b'{\"child-pid\": 99999999}\\nrea')",
        "say(b'\\n\\n')",
    ):
        assert not watched(code).ready


def test_the_clock_begins_when_a_run_is_ready() -> None:
    found = watched("time.sleep(1.2); print(time.monotonic()); say(b'ready\\n'); time.sleep(0.05)", wall_s=1.0)
    assert (found.outcome, found.ready) == (Outcome.EXITED, True)
    assert found.wall_s < time.monotonic() - float(found.stdout)
    found = watched("say(b'ready\\n'); time.sleep(30)", wall_s=0.2)
    assert found.outcome is Outcome.TIMEOUT and 0.2 <= found.wall_s < 10


def test_what_cannot_be_watched_does_not_run_on_unless_it_is_over() -> None:
    ready = "say(b'{\"child-pid\": %d}\\nready\\n'); time.sleep(%s)"
    assert watched("say(b'ready\\n'); time.sleep(30)", memory_bytes=1 << 50).outcome is Outcome.MEMORY_LIMIT
    assert watched(ready % (99999999, 0.05), memory_bytes=1).outcome is Outcome.EXITED, "it is over already"
    own = "say(b'{\"child-pid\": %%d}\\nready\\n' %% os.getpid()); time.sleep(%s)"
    assert watched(own % 0.05, memory_bytes=1 << 50).outcome is Outcome.EXITED
    assert watched(own % 30, memory_bytes=1).outcome is Outcome.MEMORY_LIMIT


def test_a_run_is_over_when_the_first_process_of_its_sandbox_is_gone() -> None:
    """It is in the group no more than what a sandbox has started, and holds no pipe."""
    first = """
ends, over = os.pipe()
if (first := os.fork()) == 0:
    os.setsid()
    os.closerange(0, 3)
    os.close(over)
    os.read(ends, 1)
    time.sleep(0.5)
    os._exit(0)
say(b'{"child-pid": %d}\\nready\\n' % first)
print(first)
"""
    found = watched(first)
    assert (found.outcome, found.exit_code) == (Outcome.EXITED, 0)
    status = Path(f"/proc/{found.stdout.strip()}/stat")  # whoever inherits it may take a while to bury it
    assert not status.exists() or status.read_text().rpartition(")")[2].split()[0] in "ZX"
