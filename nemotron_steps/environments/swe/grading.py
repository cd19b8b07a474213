"""Grading: the hidden tests on a fresh check-out with an agent's changes, in a sandbox that no agent has been in.

    fresh repository  ->  the changes that count  ->  the tests, without the values they expect  ->  the test command

An agent's processes are over by then, and nothing of its sandbox but the text of changed files comes here. What the
tests recorded is compared here, outside (blinding.py). `swe_agent` and `swerl_gen` are graded by this.
"""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from nemotron_steps.environments.swe.blinding import RECORD_BYTES, Blinded, Findings
from nemotron_steps.environments.swe.protected import is_test
from nemotron_steps.environments.swe.results import test_run
from nemotron_steps.environments.swe.working_copy import Changes, ImageCopy, WorkingCopy
from nemotron_steps.sandbox.base import Outcome, SandboxResult
from nemotron_steps.sandbox.session import SandboxSession

TESTS = "{tests}"
"""Stands in a test command for the test files' paths. A command without it names its tests itself."""
READ_S = 60.0

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
    files: Mapping[str, str] = field(default_factory=dict)
    patch: str = ""

    @classmethod
    def of(cls, row: Mapping[str, Any], default_command: str) -> HiddenTests:
        """Those of a row."""
        files = row.get("test_files") or {}
        return cls(str(row.get("test_command") or default_command), files, str(row.get("test_patch") or ""))

    @property
    def modules(self) -> list[str]:
        """Paths of the test files that are run, as against those that they need."""
        return test_modules({*self.files, *_PATCHED.findall(self.patch)})


@dataclass(frozen=True)
class Graded:
    """How a test run went.

    Attributes:
        passed: tests that the runner reports as passed and whose records, if they have any, are right.
        proved: those of them that have records.
        outcome: TIMEOUT or MEMORY_LIMIT where it did not end by itself.
        applied: the changes (and the tests) fitted the check-out.
    """

    passed: frozenset[str] = frozenset()
    proved: frozenset[str] = frozenset()
    outcome: Outcome = Outcome.EXITED
    applied: bool = True
    output: str = ""


@dataclass(frozen=True)
class Ready:
    """A repository in a session, with the changes and the tests as they were written."""

    session: SandboxSession
    root: str
    modules: Sequence[str]


async def run_tests(
    session: Callable[[], SandboxSession],
    copy: Callable[[SandboxSession], WorkingCopy],
    changes: Changes,
    tests: HiddenTests,
    wall_s: float,
    *,
    blinded: bool = True,
) -> Graded:
    """Run the tests on a fresh check-out with the changes.

    Args:
        session: makes one that is not entered yet.
        copy: the check-out in a session.
        wall_s: for the test command.
        blinded: False: the tests as they were written, for code that is trusted.

    Raises:
        SandboxError: the sandbox could not be set up. SessionOverError: it ended, other than by the tests.
    """

    @asynccontextmanager
    async def ready() -> AsyncIterator[Ready | None]:
        async with session() as entered:
            checked_out = copy(entered)
            await checked_out.lay()
            fits = await checked_out.apply(changes)
            if fits and tests.patch and isinstance(checked_out, ImageCopy):
                fits = await checked_out.apply_patch(tests.patch)
            if fits:
                await entered.write({f"{checked_out.root}/{path}": text for path, text in tests.files.items()})
            yield Ready(entered, checked_out.root, tests.modules) if fits else None

    command = tests.command.replace(TESTS, " ".join(map(shlex.quote, tests.modules)))
    return await run_blinded(ready, command, wall_s, blinded=blinded)


async def run_blinded(
    ready: Callable[[], AbstractAsyncContextManager[Ready | None]],
    command: str,
    wall_s: float | None,
    *,
    blinded: bool = True,
) -> Graded:
    """Run a test command, once or, where values have to be compared among candidates, twice.

    Args:
        ready: makes a session with everything laid; None where something did not fit.
        blinded: see run_tests.
    """
    tests: Blinded | None = None
    findings = Findings(frozenset(), frozenset())
    for _ in range(2):
        async with ready() as laid:
            if laid is None:
                return Graded(applied=False)
            if tests is None:  # nothing that was changed has run yet
                tests = Blinded(await _read(laid, laid.modules if blinded else ()))
            texts = tests.texts(findings.opaque)
            if texts:
                await laid.session.write({f"{laid.root}/{path}": text for path, text in texts.items()})
            result = await laid.session.run(["/bin/bash", "-c", command], cwd=laid.root, wall_s=wall_s)
            records = await _records(laid, tests) if texts and result.outcome is Outcome.EXITED else ""
        findings, output = await asyncio.to_thread(_findings, tests, result, records)
        if not findings.opaque or result.outcome is not Outcome.EXITED:
            break
    right = findings.right if not findings.opaque else frozenset[str]()
    return Graded(right, findings.proved & right, result.outcome, output=output)


def test_modules(paths: Iterable[str]) -> list[str]:
    """Those of some files that a runner is given."""
    return sorted(path for path in set(paths) if path.endswith(".py") and is_test(path) and _runs(path))


def _findings(tests: Blinded, result: SandboxResult, records: str) -> tuple[Findings, str]:
    output = tests.as_written(f"{result.stdout}\n{result.stderr}")
    run = test_run(output)
    return tests.findings(run.passed, run.others, records), output


async def _read(laid: Ready, modules: Iterable[str]) -> dict[str, str]:
    found = {}
    for path in modules:
        result = await laid.session.run(["cat", "--", path], cwd=laid.root, wall_s=READ_S)
        if result.ok:
            found[path] = result.stdout
    return found


async def _records(laid: Ready, tests: Blinded) -> str:
    argv = ["head", "-c", str(RECORD_BYTES), "--", tests.record_path]
    return (await laid.session.run(argv, cwd="/", wall_s=READ_S)).stdout


def _runs(path: str) -> bool:
    name = path.rsplit("/", 1)[-1]
    return name.startswith("test") or name.endswith("_test.py")
