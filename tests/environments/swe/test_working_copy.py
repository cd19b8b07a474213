"""What a working copy asks of its session; what a real one does with it is in test_swe_agent.py and test_images.py."""

import asyncio
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.environments.swe.working_copy import Changes, FilesCopy, ImageCopy, is_protected
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


@pytest.mark.parametrize(
    "path",
    [
        *("conftest.py", "a/conftest.py", "sitecustomize.py", "pytest.ini", "a/tox.ini", "pyproject.toml", "setup.cfg"),
        *(
            "usercustomize.py",
            ".pytest.ini",
            "a/pytest.ini",
            "a/pytest.toml",
            ".pytest.toml",
            "a/.coveragerc",
            "noxfile.py",
        ),
        *("tests/a.txt", "a/Test/b.py", "test_a.py", "a/a_test.py", "a/tests.py", "TEST_A.PY"),
        *("a.pyc", "a.pyo", "a/b.so", "a.pyd", "x.pth", "a.egg-link"),
        *(".git/config", "a/__pycache__/b.py", ".venv/a.py", "venv/lib/a.py", ".tox/a"),
        *(".hg/a", ".svn/a", ".nox/a", ".pytest_cache/a"),
        *("py.py", "pluggy/a.py", "src/iniconfig.py", "lib/packaging/a.py", "xdist.py", "coverage/a.py", "nose.py"),
        *("json.py", "json/__init__.py", "src/random.py", "lib/pytest/a.py", "_pytest/x.py", "os.txt"),
        *("/etc/passwd", "../a.py", "a/../b.py", "", "."),
    ],
)
def test_what_grades_or_steers_the_tests_is_not_the_agents_to_change(path: str) -> None:
    assert is_protected(path, {"a.py"})


@pytest.mark.parametrize(
    "path",
    [
        *("a.py", "new.py", "src/new.py", "src", "testing.py", "a/contest.py", "a_tests.py", "docs/test_a.md"),
        *("a/json.py", "setup.py", "README.md", "git/a.py", "json2.py", "src/a/random.py"),
    ],
)
def test_other_files_are(path: str) -> None:
    assert not is_protected(path, {"a.py"})


def test_a_module_that_the_repository_has_itself_is_not_shadowed_by_one_more_file() -> None:
    assert not is_protected("json/more.py", {"json/__init__.py"})
    assert not is_protected("json/more.py", {"json.py"})
    assert not is_protected("src/json/more.py", {"src/json/__init__.py"})
    assert not is_protected("json.py", {"json.py"})  # it is that file itself
    assert not is_protected("json.txt", {"json.txt"})
    assert is_protected("json/more.py", {"src/json/__init__.py", "jsonic/__init__.py"})
    assert is_protected("src/json/more.py", {"json/__init__.py"})
