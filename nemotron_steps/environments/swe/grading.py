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
from nemotron_steps.environments.swe.working_copy import Changes, WorkingCopy
from nemotron_steps.sandbox.base import Outcome
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
        solution: a diff that is known to solve the task; "" where none is known.
    """

    command: str
    files: Mapping[str, str] = field(default_factory=dict)
    patch: str = ""
    solution: str = ""

    @classmethod
    def of(cls, row: Mapping[str, Any], default_command: str) -> HiddenTests:
        """Those of a row."""
        command = str(row.get("test_command") or default_command)
        patches = (str(row.get(key) or "") for key in ("test_patch", "patch"))
        return cls(command, row.get("test_files") or {}, *patches)

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
    async def ready(solved: bool) -> AsyncIterator[Ready | None]:
        async with session() as entered:
            checked_out = copy(entered)
            await checked_out.lay()
            if solved:
                fits = bool(tests.solution) and await checked_out.apply_patch(tests.solution)
            else:
                fits = await checked_out.apply(changes)
            fits = fits and await checked_out.apply_patch(tests.patch)
            if fits:
                await entered.write({f"{checked_out.root}/{path}": text for path, text in tests.files.items()})
            yield Ready(entered, checked_out.root, tests.modules) if fits else None

    command = tests.command.replace(TESTS, " ".join(map(shlex.quote, tests.modules)))
    return await run_blinded(ready, command, wall_s, blinded=blinded)


async def run_blinded(
    ready: Callable[[bool], AbstractAsyncContextManager[Ready | None]],
    command: str,
    wall_s: float | None,
    *,
    blinded: bool = True,
) -> Graded:
    """Run a test command: once, and again where values have to be compared among candidates.

    Which values those are, the known solution tells, where there is one: an answer that makes an object of a value that
    is none would see the candidates.

    Args:
        ready: makes a session with everything laid, the answer or (True) the known solution; None where something did
            not fit, or no solution is known.
        blinded: see run_tests.
    """
    async with ready(False) as laid:
        if laid is None:
            return Graded(applied=False)
        tests = Blinded(await _read(laid, laid.modules if blinded else ()))  # nothing that was changed has run yet
        run = await _run(laid, tests, tests.texts(), command, wall_s)
    if run.findings.opaque and run.outcome is Outcome.EXITED:
        allowed = run.findings.opaque
        async with ready(True) as solved:
            if solved is not None:
                allowed &= (await _run(solved, tests, tests.texts(), command, wall_s)).findings.opaque
        async with ready(False) as laid:
            assert laid is not None
            run = await _run(laid, tests, tests.texts(allowed), command, wall_s)
    return Graded(run.findings.right, run.findings.proved, run.outcome, output=run.output)


@dataclass(frozen=True)
class _Run:
    findings: Findings
    outcome: Outcome
    output: str


async def _run(laid: Ready, tests: Blinded, texts: Mapping[str, str], command: str, wall_s: float | None) -> _Run:
    if texts:
        await laid.session.write({f"{laid.root}/{path}": text for path, text in texts.items()})
    result = await laid.session.run(["/bin/bash", "-c", command], cwd=laid.root, wall_s=wall_s)
    records = ""
    if texts and result.outcome is Outcome.EXITED:
        argv = ["head", "-c", str(RECORD_BYTES), "--", tests.record_path]
        records = (await laid.session.run(argv, cwd="/", wall_s=READ_S)).stdout

    def findings() -> _Run:
        output = tests.as_written(f"{result.stdout}\n{result.stderr}")
        told = test_run(output)
        return _Run(tests.findings(told.passed, told.others, records), result.outcome, output)

    return await asyncio.to_thread(findings)


def test_modules(paths: Iterable[str]) -> list[str]:
    """Those of some files that a runner is given."""
    return sorted(path for path in set(paths) if path.endswith(".py") and is_test(path) and _runs(path))


async def _read(laid: Ready, modules: Iterable[str]) -> dict[str, str]:
    found = {}
    for path in modules:
        result = await laid.session.run(["cat", "--", path], cwd=laid.root, wall_s=READ_S)
        if result.ok:
            found[path] = result.stdout
    return found


def _runs(path: str) -> bool:
    name = path.rsplit("/", 1)[-1]
    return name.startswith("test") or name.endswith("_test.py")
