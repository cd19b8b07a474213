"""Grading: the hidden tests on a fresh check-out with an agent's changes, in a sandbox that no agent has been in.

    fresh repository  ->  the changes that count  ->  the task's own tests over them  ->  the test command

An agent's processes are over by then, and nothing of its sandbox but the text of changed files comes here.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nemotron_steps.environments.swe.protected import is_test
from nemotron_steps.environments.swe.results import Canary, TestRun, test_run
from nemotron_steps.environments.swe.working_copy import Changes, ImageCopy, WorkingCopy
from nemotron_steps.sandbox.base import Outcome
from nemotron_steps.sandbox.session import SandboxSession

TESTS = "{tests}"
"""Stands in a test command for the test files' paths. A command without it names its tests itself."""

_PATCHED = re.compile(r"^\+\+\+ b/(\S+)", re.MULTILINE)


@dataclass(frozen=True)
class HiddenTests:
    """What a task is graded by.

    Attributes:
        command: a shell command, run in the repository.
        files: path → text, laid over the check-out.
        patch: applied to the check-out.
    """

    command: str
    files: Mapping[str, str]
    patch: str = ""

    @classmethod
    def of(cls, row: Mapping[str, Any], default_command: str) -> HiddenTests:
        """Those of a row."""
        files = row.get("test_files") or {}
        return cls(str(row.get("test_command") or default_command), files, str(row.get("test_patch") or ""))

    @property
    def modules(self) -> list[str]:
        """Paths of the test files that are run, as against those that they need."""
        touched = {*self.files, *_PATCHED.findall(self.patch)}
        return sorted(path for path in touched if path.endswith(".py") and is_test(path) and _runs(path))


@dataclass(frozen=True)
class Graded:
    """How a test run went.

    Attributes:
        outcome: TIMEOUT or MEMORY_LIMIT where it did not end by itself.
        applied: the changes (and the tests) fitted the check-out.
        honest: the test that must fail was seen to fail, or the command takes none.
    """

    run: TestRun
    outcome: Outcome
    applied: bool = True
    honest: bool = True
    output: str = ""


async def run_tests(
    session: SandboxSession,
    copy: Callable[[SandboxSession], WorkingCopy],
    changes: Changes,
    tests: HiddenTests,
    wall_s: float,
) -> Graded:
    """Run the tests on a fresh check-out with the changes.

    Args:
        session: not entered yet.
        copy: the check-out in a session.
        wall_s: for the test command.

    Raises:
        SandboxError: the sandbox could not be set up. SessionOverError: it ended, other than by the tests.
    """
    canary = Canary.new() if TESTS in tests.command else None
    async with session:
        checked_out = copy(session)
        await checked_out.lay()
        fits = await checked_out.apply(changes)
        if fits and tests.patch and isinstance(checked_out, ImageCopy):
            fits = await checked_out.apply_patch(tests.patch)
        if not fits:
            return Graded(test_run(""), Outcome.EXITED, applied=False)
        files = {**tests.files, **({canary.path: canary.text} if canary is not None else {})}
        await session.write({f"{checked_out.root}/{path}": text for path, text in files.items()})
        command = tests.command.replace(TESTS, _words([*tests.modules, *([canary.path] if canary else [])]))
        result = await session.run(["/bin/bash", "-c", command], cwd=checked_out.root, wall_s=wall_s)
    output = f"{result.stdout}\n{result.stderr}"
    run = test_run(output)
    return Graded(run, result.outcome, honest=canary is None or canary.failed_in(run), output=output)


def _words(paths: Iterable[str]) -> str:
    return " ".join(map(shlex.quote, paths))


def _runs(path: str) -> bool:
    name = path.rsplit("/", 1)[-1]
    return name.startswith("test") or name.endswith("_test.py")
