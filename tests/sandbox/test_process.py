"""Running a process under a clock and an output limit, without a sandbox around it."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.sandbox import Limits, Outcome, process
from nemotron_steps.sandbox.memory import TreeMemory, _kernel, _pages
from nemotron_steps.sandbox.process import Ended, run_process


def ended(code: str, stdin: bytes = b"", *, wall_s: float = 30, output_bytes: int = 10_000_000, **more: Any) -> Ended:
    program = [sys.executable, "-I", "-S", "-c", f"import os, sys, time\n{code}"]
    return asyncio.run(run_process(program, stdin, wall_s=wall_s, output_bytes=output_bytes, **more))


def test_output_beyond_the_limit_counts_also_where_the_programs_end_is_seen_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its last words are still in the pipe then."""

    def end_first(run: process._Run) -> Outcome:
        assert select.select([run._pidfd], [], [], 30)[0]
        return Outcome.EXITED

    monkeypatch.setattr(process._Run, "until_over", end_first)
    for written, outcome in ((10, Outcome.EXITED), (11, Outcome.OUTPUT_LIMIT)):
        found = ended(f"sys.stdout.write('x' * {written})", output_bytes=10)
        assert (found.outcome, found.stdout) == (outcome, "x" * 10)


def test_each_output_has_the_limit_to_itself() -> None:
    found = ended("os.write(1, b'x' * 10); os.write(2, b'y' * 10)", output_bytes=10)
    assert (found.outcome, found.stdout, found.stderr) == (Outcome.EXITED, "x" * 10, "y" * 10)


def test_input_and_output_of_any_size_pass_at_the_same_time() -> None:
    size = 3 * process.CHUNK + 1
    text = bytes(range(97, 123)) * (size // 26)
    found = ended("while (part := os.read(0, 4096)): os.write(1, part)", text)
    assert (found.outcome, found.exit_code, found.stdout) == (Outcome.EXITED, 0, text.decode())


def test_a_program_may_leave_its_input_unread() -> None:
    found = ended("os.close(0); print('x'); sys.exit(3)", b"x" * 10 * process.CHUNK)
    assert (found.outcome, found.exit_code, found.stdout) == (Outcome.EXITED, 3, "x\n")


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


def test_a_program_has_the_environment_and_the_descriptors_that_it_is_given() -> None:
    reading, writing = os.pipe()
    try:
        code = "print(sorted(set(os.environ) - {'LC_CTYPE'})); os.write(int(os.environ['FD']), b'here')"
        given = {"A": "1", "FD": str(writing)}
        found = ended(code, environment=given, pass_fds=(writing,))
        assert found.stdout == "['A', 'FD']\n" and os.read(reading, 9) == b"here"
    finally:
        os.close(reading)
        os.close(writing)


@pytest.mark.parametrize(
    ("outcome", "code", "wall_s", "spent"),
    [
        (Outcome.EXITED, 128 + signal.SIGXCPU, 1.0, True),
        (Outcome.EXITED, 128 + signal.SIGKILL, 60.0, True),
        (Outcome.EXITED, 128 + signal.SIGKILL, 59.9, False),
        (Outcome.EXITED, 1, 100.0, False),
        (Outcome.TIMEOUT, 128 + signal.SIGXCPU, 100.0, False),
    ],
)
def test_spent_processor_time_shows_in_how_a_program_ended(
    outcome: Outcome, code: int, wall_s: float, spent: bool
) -> None:
    found = Ended(outcome, code, "out", "err", wall_s, ready=True)
    assert found.spent_processor_time(Limits(cpu_s=60)) is spent
    assert found.result().exit_code == (code if outcome is Outcome.EXITED else None)
    limited = found.result(Outcome.MEMORY_LIMIT)
    assert (limited.outcome, limited.exit_code, limited.stderr) == (Outcome.MEMORY_LIMIT, None, "err")


def test_the_memory_of_a_process_is_its_pages_swap_tables_and_stacks() -> None:
    fields = {"RssAnon": 10, "VmSwap": 5, "VmPTE": 3, "Threads": 2, "RssFile": 99}
    assert (_pages(fields), _kernel(fields)) == (15 * 1024, 3 * 1024 + 2 * 16 * 1024)
    assert _pages({}) == _kernel({}) == 0


def test_a_tree_is_counted_from_its_own_proc_and_folders(tmp_path: Any) -> None:
    memory = TreeMemory(os.getpid(), (str(tmp_path),))
    try:
        own = memory._fields("self/status")
        assert own["RssAnon"] > 1000 and own["Threads"] >= 1 and own["Pid"] == os.getpid()
        assert 0 < memory._proportional("self", own) < 4 * _pages(own)
        assert memory._proportional("999999999", own) == 0
        assert memory.held(1 << 62) > _pages(own)
        stats = os.statvfs(tmp_path)
        used = stats.f_frsize * (stats.f_blocks - stats.f_bfree) + 1024 * (stats.f_files - stats.f_ffree)
        assert memory._in_folders() == pytest.approx(used, rel=0.05)
    finally:
        memory.close()


@pytest.mark.parametrize(
    ("left", "pause"),
    [(0, 0.01), (1 << 50, 0.1), (process.FILL_BYTES_PER_S * 0.05, 0.05)],
    ids=["little", "much", "some"],
)
def test_memory_is_looked_at_before_what_is_left_could_be_filled(
    left: float, pause: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    run = object.__new__(process._Run)
    run._memory_bytes, run._rest, run._outcome = 1 << 51, None, None

    class Held:
        def held(self, limit: int) -> float:
            return limit - left

    run._look(Held(), 100.0)  # type: ignore[arg-type]
    assert run._outcome is None and run._next_look == pytest.approx(100.0 + pause)
    left = -1
    run._look(Held(), 100.0)  # type: ignore[arg-type]
    assert run._outcome is Outcome.MEMORY_LIMIT
