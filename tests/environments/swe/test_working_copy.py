"""What a working copy asks of its session; what a real one does with it is in test_swe_agent.py and test_images.py."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from nemotron_steps.environments.swe.working_copy import Changes, FilesCopy
from nemotron_steps.sandbox.base import Outcome, SandboxResult


class Noted:
    """A session that does nothing and notes what it is asked."""

    def __init__(self, exit_code: int = 0) -> None:
        self.exit_code = exit_code
        self.ran: list[tuple[list[str], str | None]] = []
        self.written: dict[str, str] = {}

    async def run(self, argv: Sequence[str], *, cwd: str | None = None, **_: Any) -> SandboxResult:
        self.ran.append((list(argv), cwd))
        return SandboxResult(Outcome.EXITED, self.exit_code, "", "", 0.0)

    async def write(self, files: Mapping[str, str]) -> None:
        self.written |= files


@pytest.mark.parametrize(("exit_code", "fits"), [(0, True), (1, False)])
def test_files_that_the_agent_removed_are_removed_where_it_is_graded(exit_code: int, fits: bool) -> None:
    session = Noted(exit_code)
    copy = FilesCopy(session, {"a.py": "1", "b.py": "2"}, 100)  # type: ignore[arg-type]
    assert asyncio.run(copy.apply(Changes({"a.py": "3", "b.py": None, "-r": None}))) is fits
    assert session.written == {"/scratch/repo/a.py": "3"}
    assert session.ran == [(["rm", "-f", "--", "b.py", "-r"], "/scratch/repo")]
    assert asyncio.run(copy.apply(Changes({"a.py": "4"}))) and len(session.ran) == 1
