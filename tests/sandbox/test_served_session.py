"""Sessions whose commands a server runs, over a server without a sandbox around it."""

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest

from nemotron_steps.sandbox.base import Limits, Outcome, SandboxResult
from nemotron_steps.sandbox.command_server import COMMAND_SERVER
from nemotron_steps.sandbox.session import LINE_BYTES, ServedSession, SessionOverError


class Plain(ServedSession):
    program = COMMAND_SERVER

    async def _begin(self) -> None:
        words = ("-I", "-S", "-c", self.program, "0", "1", "together")
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            sys.executable, *words, stdin=pipe, stdout=pipe, stderr=pipe, limit=LINE_BYTES
        )

        async def whole() -> SandboxResult:
            assert process.stderr is not None
            try:
                said = (await process.stderr.read()).decode()
            finally:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
            return SandboxResult(Outcome.EXITED, process.returncode, "", said, 0.0)

        self._whole = asyncio.ensure_future(whole())
        self._reader, self._writer = process.stdout, process.stdin


def inside(folder: Path, work: Callable[[Plain], Awaitable[None]], command_s: float | None = None) -> None:
    async def body() -> None:
        limits = Limits(wall_s=30.0, output_bytes=4096)
        async with Plain(limits, asyncio.Semaphore(8), str(folder), command_s) as session:
            await work(session)

    asyncio.run(body())


def test_commands_take_turns_and_work_where_the_session_does_unless_they_say(tmp_path: Path) -> None:
    async def work(session: Plain) -> None:
        both = await asyncio.gather(*(session.run(["sh", "-c", f"sleep 0.05; echo {at}; pwd"]) for at in "ab"))
        assert [each.stdout for each in both] == [f"{at}\n{tmp_path}\n" for at in "ab"]
        assert (await session.run(["pwd"], cwd="/usr")).stdout == "/usr\n"

    inside(tmp_path, work)


def test_a_command_that_was_given_up_is_killed_and_answers_for_no_other(tmp_path: Path) -> None:
    async def work(session: Plain) -> None:
        for number in range(3):
            running = asyncio.ensure_future(session.run(["sh", "-c", f"echo old; : > {number}; sleep 30"]))
            while not (tmp_path / str(number)).exists():
                await asyncio.sleep(0.01)
            waiting = [asyncio.ensure_future(session.run(["echo", "never"])) for _ in range(number)]
            running.cancel()
            for each in waiting:
                await asyncio.sleep(0)
                each.cancel()
            await asyncio.wait([running, *waiting])
            assert running.cancelled() and all(each.cancelled() for each in waiting)
            result = await session.run(["echo", f"new {number}"], wall_s=10.0)
            assert (result.outcome, result.stdout) == (Outcome.EXITED, f"new {number}\n")

    inside(tmp_path, work)


def test_a_server_that_reads_nothing_any_more_ends_the_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemotron_steps.sandbox.session.GRACE_S", 0.5)

    async def work(session: Plain) -> None:
        pid = int((await session.run(["sh", "-c", "echo $PPID"])).stdout)
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(SessionOverError):
            async with asyncio.timeout(20):
                await session.run(["true"], stdin="x" * 10_000_000, wall_s=0.5)

    inside(tmp_path, work)
