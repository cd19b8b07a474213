"""Grading: the hidden tests on a fresh check-out with an agent's changes, in a sandbox that no agent has been in.

    fresh repository  ->  the changes that count  ->  the tests, without the values they expect  ->  the test command

An agent's processes are over by then, and nothing of its sandbox but the text of changed files comes here. What the
tests recorded is compared here, outside (blinding.py). `swe_agent` and `swerl_gen` are graded by this.
"""

from __future__ import annotations

import asyncio
import re
import shlex
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from nemotron_steps.environments.swe.blinding import Blinded
from nemotron_steps.environments.swe.expectations import RECORD_BYTES, Findings
from nemotron_steps.environments.swe.harness import test_run
from nemotron_steps.environments.swe.working_copy import Changes, WorkingCopy, is_test
from nemotron_steps.sandbox.base import Outcome
from nemotron_steps.sandbox.session import ServedSession, SessionOverError

TESTS = "{tests}"
"""Stands in a test command for the test files' paths. A command without it names its tests itself."""
READ_S = 60.0
REMEMBERED = 1024

_PATCHED = re.compile(r"^\+\+\+ b/(\S+)", re.MULTILINE)


@dataclass(frozen=True)
class HiddenTests:
    """What a task is graded by: a shell command, files (path → text) laid over the check-out, a patch of it, and a diff
    that is known to solve the task; "" where none is known."""

    command: str
    files: Mapping[str, str] = field(default_factory=dict)
    patch: str = ""
    solution: str = ""

    @classmethod
    def of(cls, row: Mapping[str, Any], default_command: str) -> HiddenTests:
        command = str(row.get("test_command") or default_command)
        patches = (str(row.get(key) or "") for key in ("test_patch", "patch"))
        return cls(command, row.get("test_files") or {}, *patches)

    @property
    def shell(self) -> str:
        return self.command.replace(TESTS, " ".join(map(shlex.quote, self.modules)))

    @property
    def modules(self) -> list[str]:
        """Paths of the test files that are run, as against those that they need."""
        return test_modules({*self.files, *_PATCHED.findall(self.patch)})


@dataclass(frozen=True)
class Graded:
    """How a test run went: tests that the runner reports as passed and whose records, if any, are right; those of them
    that have records; TIMEOUT or MEMORY_LIMIT where it did not end by itself; whether the changes (and the tests)
    fitted the check-out."""

    passed: frozenset[str] = frozenset()
    proved: frozenset[str] = frozenset()
    outcome: Outcome = Outcome.EXITED
    applied: bool = True
    output: str = ""


@dataclass(frozen=True)
class Ready:
    """A repository in a session, with the changes and the tests as they were written."""

    session: ServedSession
    root: str
    modules: Sequence[str]


def prepared(
    session: Callable[[], ServedSession],
    copy: Callable[[ServedSession], WorkingCopy],
    changes: Changes,
    tests: HiddenTests,
) -> Prepare:
    """What a Grader needs, for changes to a fresh check-out."""

    @asynccontextmanager
    async def prepare(solved: bool) -> AsyncIterator[Ready | None]:
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

    return prepare


Prepare = Callable[[bool], AbstractAsyncContextManager[Ready | None]]
"""Makes a session with everything laid, the answer or (True) the known solution. None: something did not fit, or no
solution is known."""


@dataclass
class _Task:
    """What is known of a task: its blinded tests; of its solution, once asked, what those say."""

    tests: Blinded | None = None
    asked: bool = False
    unproved: frozenset[str] = frozenset()
    opaque: frozenset[str] | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Answers to one task are graded at once; what is known of it is found out once."""


@dataclass(frozen=True)
class _Run:
    claimed: frozenset[str]
    findings: Findings
    outcome: Outcome
    output: str


class Grader:
    """Runs hidden tests, and again where values have to be compared among candidates.

    Which values those are, the known solution tells, where there is one: an answer that makes an object of a value that
    is none would see the candidates. The solution also tells which tests do not bear to be blinded; they count as the
    runner reports them, and are not `proved`. It is asked once, when an answer is doubtful.
    """

    def __init__(self) -> None:
        self._tasks: OrderedDict[str, _Task] = OrderedDict()

    async def grade(self, task: str, prepare: Prepare, command: str, wall_s: float | None) -> Graded:
        known = self._tasks.setdefault(task, _Task())
        if len(self._tasks) > REMEMBERED:
            self._tasks.popitem(last=False)
        async with prepare(False) as laid:
            if laid is None:
                return Graded(applied=False)
            if known.tests is None:
                texts: dict[str, str] = {}  # nothing that was changed has run yet
                for path in laid.modules:
                    read = await laid.session.run(["cat", "--", path], cwd=laid.root, wall_s=READ_S)
                    if read.ok:
                        texts[path] = read.stdout
                known.tests = known.tests or Blinded(texts)
            tests = known.tests
            run = await _run(laid, tests, command, wall_s)
        if run.outcome is Outcome.EXITED and (run.claimed != run.findings.right or run.findings.opaque):
            await _ask(known, tests, prepare, command, wall_s)
        opaque = run.findings.opaque if known.opaque is None else run.findings.opaque & known.opaque
        if run.findings.opaque and run.outcome is Outcome.EXITED:
            async with prepare(False) as laid:
                assert laid is not None
                run = await _run(laid, tests, command, wall_s, opaque)
        right = run.findings.right | (run.claimed & known.unproved)
        return Graded(right, run.findings.proved, run.outcome, output=run.output)


async def _ask(task: _Task, tests: Blinded, prepare: Prepare, command: str, wall_s: float | None) -> None:
    """What the blinded tests say of the known solution, if that is not known yet."""
    async with task.lock:
        runs: list[_Run] = []
        try:
            while not task.asked and (not runs or (len(runs) == 1 and runs[0].findings.opaque)):
                async with prepare(True) as laid:
                    if laid is None:
                        break
                    opaque = runs[0].findings.opaque if runs else None
                    runs.append(await _run(laid, tests, command, wall_s, opaque))
        except SessionOverError:  # over the solution: no fault of the answer's
            runs = []
        if runs and runs[-1].outcome is Outcome.EXITED:
            task.opaque, task.unproved = runs[0].findings.opaque, runs[-1].claimed - runs[-1].findings.right
        task.asked = True


async def _run(
    laid: Ready, tests: Blinded, command: str, wall_s: float | None, opaque: frozenset[str] | None = None
) -> _Run:
    orders = None if opaque is None else tests.expected.orders(opaque)
    if texts := tests.texts(orders):
        await laid.session.write({f"{laid.root}/{path}": text for path, text in texts.items()})
    result = await laid.session.run(["/bin/bash", "-c", command], cwd=laid.root, wall_s=wall_s)
    records = ""
    if texts and result.outcome is Outcome.EXITED:
        argv = ["head", "-c", str(RECORD_BYTES), "--", tests.record_path]
        records = (await laid.session.run(argv, cwd="/", wall_s=READ_S)).stdout
    output = await asyncio.to_thread(tests.expected.as_written, f"{result.stdout}\n{result.stderr}")
    passed, others = await asyncio.to_thread(test_run, output)
    found = await asyncio.to_thread(tests.expected.findings, passed, others, records, orders)
    return _Run(passed, found, result.outcome, output)


async def run_as_written(prepare: Prepare, command: str, wall_s: float) -> Graded:
    """The tests of code that is trusted, as they were written."""
    async with prepare(False) as laid:
        if laid is None:
            return Graded(applied=False)
        run = await _run(laid, Blinded({}), command, wall_s)
    return Graded(run.claimed, outcome=run.outcome, output=run.output)


def test_modules(paths: Iterable[str]) -> list[str]:
    """Those of some files that a runner is given."""
    tests = [path for path in set(paths) if path.endswith(".py") and is_test(path)]
    return sorted(path for path in tests if re.search(r"(^|/)(test[^/]*|[^/]*_test\.py)$", path))
