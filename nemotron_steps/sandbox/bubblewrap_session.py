"""A bubblewrap sandbox that stays: one set of namespaces and one folder in memory over many commands.

The bounds are those of one run (bubblewrap.py): memory, files included, processes, size of a file; `limits.wall_s` is
the whole session's time. A server inside runs the commands (command_server.py), one at a time. A command is of the same
user as the server, so it can kill it: the session is then over, which is the command's own loss and nobody else's.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType

from nemotron_steps.errors import SandboxError
from nemotron_steps.sandbox.base import Limits, Outcome, SandboxResult
from nemotron_steps.sandbox.bubblewrap import WORK, BubblewrapSandbox
from nemotron_steps.sandbox.command_server import COMMAND_SERVER
from nemotron_steps.sandbox.session import SessionOverError

GRACE_S = 10.0
"""For the server to answer once a command's time is over. Later than that, it has been stopped."""
WRITING_S = 60.0
LINE_BYTES = 256 << 20
"""Of an answer: more than any output limit, escaped."""


class BubblewrapSession:
    """See the module docstring; the methods are those of SandboxSession.

    Args:
        sandbox: says what of the host is shown; as many commands run at once, in all its sessions, as it has slots.
        limits: of the session; `wall_s` is its total time.
        command_s: seconds of a command, where `run` is not told.
    """

    def __init__(
        self, sandbox: BubblewrapSandbox, *, limits: Limits | None = None, command_s: float | None = None
    ) -> None:
        self._sandbox = sandbox
        self.limits = limits or Limits()
        self._command_s = self.limits.wall_s if command_s is None else command_s
        self._whole: asyncio.Task[SandboxResult] | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._one_at_a_time = asyncio.Lock()

    async def __aenter__(self) -> BubblewrapSession:
        await self._sandbox.start()
        async with self._sandbox.slots:
            return await self._begin()

    async def _begin(self) -> BubblewrapSession:
        ours, theirs = socket.socketpair()
        with theirs:
            ours.setblocking(False)
            # Two numbers, because a file object that reads and writes would have to seek.
            other = os.dup(theirs.fileno())
            given = (theirs.fileno(), other)
            argv = [self._sandbox.python, "-I", "-S", "-B", "-c", COMMAND_SERVER, *map(str, given), "alone"]
            self._whole = asyncio.ensure_future(self._sandbox.execute_with(argv, b"", {}, self.limits, given))
            try:
                self._reader, self._writer = await asyncio.open_connection(sock=ours, limit=LINE_BYTES)
                # It is there once it has answered; until then this end has to stay open.
                await self._ask({"argv": ["true"], "cwd": "/", "stdin": "", "wall_s": 60.0, "output_bytes": 1}, 120.0)
            except BaseException as error:
                os.close(other)
                await self.__aexit__(type(error), error, error.__traceback__)
                if isinstance(error, SessionOverError):
                    self._whole.result()
                    raise SandboxError("a sandbox session ended before its first command") from error
                raise
            os.close(other)
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
            "cwd": cwd or WORK,
            "stdin": stdin,
            "wall_s": wall,
            "output_bytes": self.limits.output_bytes,
        }
        async with self._one_at_a_time, self._sandbox.slots:
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
        with suppress(ConnectionError, TimeoutError, ValueError):
            self._writer.write(json.dumps(job).encode() + b"\n")
            await self._writer.drain()
            async with asyncio.timeout(wall_s):
                line = await self._reader.readline()
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

    def _over(self) -> SessionOverError:
        assert self._whole is not None and self._whole.done(), "asked of a session that has ended"
        if self._whole.cancelled():
            return SessionOverError(Outcome.EXITED)
        return SessionOverError(self._whole.result().outcome)
