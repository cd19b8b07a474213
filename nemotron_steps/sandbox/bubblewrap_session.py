"""A bubblewrap sandbox that stays: one set of namespaces and one folder in memory over many commands.

The bounds are those of one run (bubblewrap.py): memory, files included, processes, size of a file; `limits.wall_s` is
the whole session's time.
"""

from __future__ import annotations

import asyncio
import os
import socket

from nemotron_steps.sandbox.base import Limits, SandboxResult
from nemotron_steps.sandbox.bubblewrap import WORK, BubblewrapSandbox
from nemotron_steps.sandbox.command_server import COMMAND_SERVER
from nemotron_steps.sandbox.process import Rest
from nemotron_steps.sandbox.served_session import LINE_BYTES, ServedSession


class BubblewrapSession(ServedSession):
    """See the module docstring.

    Args:
        sandbox: says what of the host is shown; as many commands run at once, in all its sessions, as it has slots.
        limits: of the session; `wall_s` is its total time.
        command_s: seconds of a command, where `run` is not told.
    """

    def __init__(
        self, sandbox: BubblewrapSandbox, *, limits: Limits | None = None, command_s: float | None = None
    ) -> None:
        super().__init__(limits or Limits(), sandbox.slots, WORK, command_s)
        self._sandbox = sandbox
        self._given: tuple[int, ...] = ()
        self._rest: Rest | None = None

    async def __aenter__(self) -> BubblewrapSession:
        await self._sandbox.start()
        try:
            return await super().__aenter__()
        finally:
            # The other end, which had to stay open until there was somebody inside to hold it.
            for descriptor in self._given:
                os.close(descriptor)
            self._given = ()

    async def _begin(self) -> None:
        ours, theirs = socket.socketpair()
        # Two numbers, because a file object that reads and writes would have to seek.
        other = os.dup(theirs.fileno())
        self._given = (theirs.detach(), other)
        ours.setblocking(False)
        argv = [self._sandbox.python, "-I", "-S", "-B", "-c", COMMAND_SERVER, *map(str, self._given), "alone"]
        self._rest = rest = Rest()
        whole = self._sandbox.execute_with(argv, b"", {}, self.limits, self._given, rest)
        self._whole = asyncio.ensure_future(whole)
        self._whole.add_done_callback(lambda _: rest.close())
        self._reader, self._writer = await asyncio.open_connection(sock=ours, limit=LINE_BYTES)

    async def _ask(self, job: dict[str, object], wall_s: float) -> SandboxResult:
        if self._rest is None:
            raise RuntimeError("the session was not entered")
        self._rest.end()
        result = await super()._ask(job, wall_s)
        # The server has killed whatever the command left running. Whoever is cancelled does not know that.
        self._rest.begin()
        return result
