"""Sessions whose commands a server inside runs (command_server.py), one at a time.

A command is of the same user as the server, so it can kill it: the session is then over, which is the command's own
loss and nobody else's.
"""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

from nemotron_steps.errors import SandboxError
from nemotron_steps.sandbox.base import Limits, Outcome, SandboxResult
from nemotron_steps.sandbox.session import SessionOverError

GRACE_S = 10.0
"""For the server to answer once a command's time is over. Later than that, it has been stopped."""
WRITING_S = 60.0
LINE_BYTES = 256 << 20
"""Of an answer: more than any output limit, escaped."""


class ServedSession(ABC):
    """See the module docstring; the methods are those of SandboxSession.

    Args:
        limits: of the session; `wall_s` is its total time.
        slots: held while a command runs.
        work: where commands run that name no folder.
        command_s: seconds of a command, where `run` is not told.
    """

    def __init__(self, limits: Limits, slots: asyncio.Semaphore, work: str, command_s: float | None) -> None:
        self.limits = limits
        self._slots = slots
        self._work = work
        self._command_s = limits.wall_s if command_s is None else command_s
        self._whole: asyncio.Future[SandboxResult] | None = None
        """How the session ended, once it has."""
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._one_at_a_time = asyncio.Lock()
        self._owed = 0
        """Answers to come, those to commands that were given up included."""

    @abstractmethod
    async def _begin(self) -> None:
        """Start the server: `_whole` first, then `_reader` and `_writer`."""

    async def __aenter__(self) -> Self:
        try:
            async with self._slots:
                await self._begin()
                # It is there once it has answered.
                job = {"argv": ["true"], "cwd": "/", "stdin": "", "wall_s": 60.0, "output_bytes": 1}
                await self._ask(job, 120.0)
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            if isinstance(error, SessionOverError):
                said = "" if self._whole is None or self._whole.cancelled() else self._whole.result().stderr[-500:]
                raise SandboxError("a sandbox session ended before its first command", found=said) from error
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is not None:
            self._writer.close()
        if self._whole is not None and not self._whole.done():
            self._whole.cancel()
            await asyncio.wait([self._whole])

    async def run(
        self, argv: Sequence[str], *, cwd: str | None = None, stdin: str = "", wall_s: float | None = None
    ) -> SandboxResult:
        """See SandboxSession.run."""
        wall = self._command_s if wall_s is None else wall_s
        job = {
            "argv": list(argv),
            "cwd": cwd or self._work,
            "stdin": stdin,
            "wall_s": wall,
            "output_bytes": self.limits.output_bytes,
        }
        async with self._one_at_a_time, self._slots:
            return await self._ask(job, wall + GRACE_S)

    async def write(self, files: Mapping[str, str]) -> None:
        """See SandboxSession.write."""
        async with self._one_at_a_time:
            result = await self._ask({"files": dict(files)}, WRITING_S)
        if not result.ok:
            raise SandboxError("could not write files in the sandbox", found=result.stderr[-500:])

    async def _ask(self, job: dict[str, object], wall_s: float) -> SandboxResult:
        if self._reader is None or self._writer is None or self._whole is None:
            raise RuntimeError("the session was not entered")
        if self._whole.done():
            raise self._over()
        line = b""
        self._writer.write(json.dumps(job).encode() + b"\n")
        self._owed += 1
        try:
            with suppress(ConnectionError, TimeoutError, ValueError):
                async with asyncio.timeout(wall_s):
                    await self._writer.drain()
                    line = await self._answer(self._reader)
        except asyncio.CancelledError:
            self._writer.write(b"\n")  # nobody waits for it any more: the server kills it
            raise
        if not line.endswith(b"\n"):
            # A server that was stopped holds the session; one that is gone ends it presently.
            await asyncio.wait([self._whole], timeout=1.0)
            if not self._whole.done():
                self._whole.cancel()
                await asyncio.wait([self._whole])
            raise self._over()
        answer = json.loads(line)
        outcome = Outcome(answer["outcome"])
        code = answer["code"] if outcome is Outcome.EXITED else None
        return SandboxResult(outcome, code, answer["out"], answer["err"], answer["wall_s"])

    async def _answer(self, reader: asyncio.StreamReader) -> bytes:
        """The last of those that are owed."""
        while True:
            line = await reader.readline()
            self._owed -= 1
            if not (line and self._owed):
                return line

    def _over(self) -> SessionOverError:
        assert self._whole is not None and self._whole.done(), "asked of a session that has ended"
        if self._whole.cancelled():
            return SessionOverError(Outcome.EXITED)
        return SessionOverError(self._whole.result().outcome)
