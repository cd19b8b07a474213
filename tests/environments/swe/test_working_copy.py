"""What a working copy asks of its session; what a real one does with it is in test_swe_agent.py and test_images.py."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.environments.swe.working_copy import Changes, FilesCopy, ImageCopy
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


class Here:
    """A session whose commands run on this machine."""

    async def run(self, argv: Sequence[str], *, cwd: str, stdin: str = "", **_: Any) -> SandboxResult:
        done = subprocess.run(argv, cwd=cwd, input=stdin, capture_output=True, text=True)
        return SandboxResult(Outcome.EXITED, done.returncode, done.stdout, done.stderr, 0.0)


def test_no_link_is_new_or_leads_elsewhere_where_a_repository_of_an_image_is_graded(tmp_path: Path) -> None:
    copy = ImageCopy(Here(), str(tmp_path), "", 1000)  # type: ignore[arg-type]
    made = "git init -q && echo 1 > a.py && ln -s a.py link && ln -s a.py old && git add -A"
    asyncio.run(copy.bash(f"{made} && git -c user.name=x -c user.email=x@y commit -qm x", 10))
    asyncio.run(copy.lay())
    asyncio.run(copy.bash("echo 120000 > a.py; ln -sfn /etc link; ln -s /etc/passwd new.py; rm old", 10))
    changes = asyncio.run(copy.changes())
    assert changes.left_out == ("link", "new.py") and changes.unread == ""
    assert changes.patch.count("diff --git ") == 2 and "+120000\n" in changes.patch
    asyncio.run(copy.bash("git reset -q --hard HEAD", 10))
    assert asyncio.run(copy.apply(changes))
    assert (tmp_path / "link").readlink() == Path("a.py")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".git", "a.py", "link"]
