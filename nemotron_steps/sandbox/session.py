"""What a sandbox session is: a sandbox that stays, in which commands see each other's changes to the files.

    async with BubblewrapSession(sandbox) as session:
        await session.write({"/scratch/repo/a.py": "x = 1\\n"})
        result = await session.run(["python3", "a.py"], cwd="/scratch/repo")

A command that fails, loops or floods is a result, and the session goes on. A session that is over (its total time or
memory is used up, or a command has killed it) says so to every later command with SessionOverError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Protocol, Self

from nemotron_steps.sandbox.base import Outcome, SandboxResult


class SessionOverError(Exception):
    """The session takes no further command.

    Attributes:
        outcome: TIMEOUT or MEMORY_LIMIT of the session as a whole; EXITED where what ran in it has ended it.
    """

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(f"the sandbox session is over: {outcome.value}")
        self.outcome = outcome


class SandboxSession(Protocol):
    """A sandbox over many commands."""

    async def __aenter__(self) -> Self:
        """Start it.

        Raises:
            SandboxError: it could not be set up. UnsupportedError: what it is made of is absent.
        """
        ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End everything in it. Its files are gone."""
        ...

    async def run(
        self, argv: Sequence[str], *, cwd: str | None = None, stdin: str = "", wall_s: float | None = None
    ) -> SandboxResult:
        """Run a command to its end.

        Args:
            wall_s: seconds until it is killed with what it started; None: those of the session's limits.

        Raises:
            SessionOverError.
        """
        ...

    async def write(self, files: Mapping[str, str]) -> None:
        """Write files inside, and their folders.

        Args:
            files: absolute path → text.

        Raises:
            SandboxError: one could not be written. SessionOverError.
        """
        ...
