"""What is done in the sandbox that grades: the order, the files, and what does not fit. The sandbox is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from nemotron_steps.environments.base import Response
from nemotron_steps.environments.registry import create
from nemotron_steps.environments.swe import swe_agent
from nemotron_steps.environments.swe.grading import Graded, Grader, HiddenTests, Ready, prepared
from nemotron_steps.environments.swe.working_copy import Changes, FilesCopy, ImageCopy
from nemotron_steps.sandbox.base import Outcome, SandboxResult
from nemotron_steps.sandbox.session import SessionOverError
from tests.environments.swe.tasks import task


class Told:
    """A session in which everything succeeds but commands with a word of `fails`; notes what it is asked."""

    def __init__(self, output: str = "", *, fails: str = "nothing") -> None:
        self.output, self.fails = output, fails
        self.ran: list[str] = []
        self.written: dict[str, str] = {}
        self.open = False

    async def __aenter__(self) -> Told:
        self.open = True
        return self

    async def __aexit__(self, *_: Any) -> None:
        self.open = False

    async def write(self, files: Mapping[str, str]) -> None:
        self.written |= files

    async def run(self, argv: Sequence[str], *, cwd: str, wall_s: float, stdin: str = "") -> SandboxResult:
        self.ran.append(" ".join([*argv, stdin]))
        return SandboxResult(Outcome.EXITED, int(self.fails in self.ran[-1]), "abc\n", self.output, 0.0)


FILES = {"a.py": "x = 1\n"}


def graded(session: Any, tests: HiddenTests, *, image: bool = False, changes: Changes | None = None) -> Graded:
    def copy(session: Any) -> Any:
        return ImageCopy(session, "/testbed", "HEAD", 99) if image else FilesCopy(session, FILES, 99)

    prepare = prepared(lambda: session, copy, changes or Changes({"a.py": "x = 2\n"}), tests)
    return asyncio.run(Grader().grade("", prepare, tests.shell, 9.0))


def test_the_changes_are_laid_then_the_tests_then_they_are_run() -> None:
    session = Told("PASSED tests/test_a.py::a\n")
    tests = HiddenTests("run {tests}", {"tests/test_a.py": "t", "tests/data it.txt": "d", "a.py": "theirs"})
    found = graded(session, tests)
    root = "/scratch/repo"
    assert set(session.written) == {f"{root}/{p}" for p in ("a.py", "tests/test_a.py", "tests/data it.txt")}
    assert session.written[f"{root}/a.py"] == "theirs"
    assert session.ran == ["cat -- tests/test_a.py ", "/bin/bash -c run tests/test_a.py "] and not session.open
    assert (found.applied, found.passed, found.proved) == (True, {"tests/test_a.py::a"}, frozenset())


@pytest.mark.parametrize("broken", [False, True])
def test_the_solution_is_asked_once_and_what_breaks_it_is_no_fault_of_an_answer(broken: bool) -> None:
    asked = []

    @asynccontextmanager
    async def prepare(solved: bool) -> AsyncIterator[Ready]:
        await asyncio.sleep(0)
        if solved:
            asked.append(solved)
            if broken:
                raise SessionOverError(Outcome.EXITED)
        yield Ready(Testing(), "/r", ["tests/test_a.py"])

    class Testing(Told):
        async def run(self, argv: Sequence[str], **_: Any) -> SandboxResult:
            await asyncio.sleep(0)
            text = {"cat": "def test_a():\n    assert f() == 1\n", "head": ""}.get(
                argv[0], "PASSED tests/test_a.py::test_a\n"
            )
            return SandboxResult(Outcome.EXITED, 0, text, "", 0.0)

    async def body() -> list[Graded]:
        grader = Grader()
        return await asyncio.gather(*(grader.grade("task", prepare, "run", 9.0) for _ in range(8)))

    # The solution has no right record either: the test counts as it is reported, if the solution could be asked.
    expected = frozenset() if broken else {"tests/test_a.py::test_a"}
    assert {found.passed for found in asyncio.run(body())} == {frozenset(expected)} and len(asked) == 1


@pytest.mark.parametrize(("fails", "asked"), [("the fix", 2), ("the tests", 3)])
def test_what_does_not_fit_the_check_out_is_not_tested(fails: str, asked: int) -> None:
    session = Told(fails=fails)
    found = graded(session, HiddenTests("run", {}, "the tests"), image=True, changes=Changes(patch="the fix"))
    assert not found.applied and len(session.ran) == asked and session.written == {}
    applied = graded(whole := Told(), HiddenTests("run", {}, "the tests"), image=True, changes=Changes(patch="the fix"))
    assert applied.applied and len(whole.ran) == 4


def verdicts(
    monkeypatch: pytest.MonkeyPatch, ends: Sequence[Any], changes: Sequence[str], **settings: Any
) -> list[Any]:
    """Verdicts of rollouts with these changes; the runs of the tests end as told, one after the other."""
    left = list(ends)

    async def grade(*_: Any) -> Graded:
        ended = left.pop(0)
        if isinstance(ended, Exception):
            raise ended
        return ended

    class Copy:
        session = Told()

        def __init__(self, text: str) -> None:
            self.text = text

        async def changes(self) -> Changes:
            return Changes({"a.py": self.text}, left_out=("tests/a.py",))

    monkeypatch.setattr(swe_agent.Grader, "grade", grade)
    environment: Any = create("swe_agent", settings)

    async def body() -> list[Any]:
        found = []
        for text in changes:
            session = await environment.seed(task())
            session.state.copy = Copy(text)
            found += await environment.judge_group(task(), [Response("")], [session])
        return found

    made = asyncio.run(body())
    assert left == []
    return made


NAMES = [f"tests.test_calc.TestCalc.test_{name}" for name in ("add", "sub")]


def of(*passed: str, **how: Any) -> Graded:
    return Graded(frozenset(passed), frozenset(passed), **how)


@pytest.mark.parametrize(
    ("ended", "reward", "proved", "not_passed"),
    [
        (of(*NAMES), 1.0, 1.0, []),
        (of(*NAMES, "more"), 1.0, 1.0, []),
        (Graded(frozenset(NAMES)), 1.0, 0.0, []),
        (of(NAMES[0]), 0.0, 1.0, NAMES[1:]),
        (of(NAMES[1]), 0.0, 0.0, NAMES[:1]),
        (of(applied=False), 0.0, 0.0, NAMES),
    ],
)
def test_all_wanted_tests_pass(
    ended: Graded, reward: float, proved: float, not_passed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (verdict,) = verdicts(monkeypatch, [ended], ["1"])
    assert (verdict.reward, verdict.components["proved"]) == (reward, proved)
    assert verdict.details == {"left_out": ["tests/a.py"], "not_passed": not_passed}


@pytest.mark.parametrize(
    ("ended", "failure"),
    [
        (of(*NAMES, outcome=Outcome.TIMEOUT), "tests_timeout"),
        (SessionOverError(Outcome.TIMEOUT), "tests_timeout"),
        (SessionOverError(Outcome.MEMORY_LIMIT), "tests_out_of_memory"),
    ],
)
def test_tests_that_used_up_what_they_have_are_masked_and_run_again(
    ended: Any, failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = verdicts(monkeypatch, [ended, of(*NAMES)], ["1", "1"])
    assert (first.reward, first.failure, second.reward) == (None, failure, 1.0)


def test_code_that_ends_the_sandbox_of_its_tests_earns_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    (verdict,) = verdicts(monkeypatch, [SessionOverError(Outcome.EXITED)], ["1"])
    assert verdict.reward == 0.0
