"""A suite: named checks of one kind of thing, each an item that pytest shows, selects and overrides by name. A check
raises Unmet, or NotApplicable, and is skipped behind one of its `needs` that did not pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Generic, TypeVar

from nemotron_steps.errors import StepsError

SubjectT = TypeVar("SubjectT")


class Unmet(AssertionError):
    """What a check found. `hint` says what to write instead."""

    def __init__(self, what: str, *, where: str | None = None, found: object = None, hint: str | None = None) -> None:
        lines = [what]
        lines += [f"  --> {where}"] if where else []
        lines += [f"  found: {found}"] if found is not None else []
        lines += [f"  hint:  {hint}"] if hint else []
        super().__init__("\n".join(lines))


def told(
    error: StepsError | Mapping[str, Any], before: str = "", *, where: str | None = None, hint: str | None = None
) -> Unmet:
    """What an error, or the JSON of one, says, with words `before` it; `hint`: if it has none."""
    said = error.to_dict() if isinstance(error, StepsError) else error
    code = f"{said['code']}: " if said.get("code") else ""
    hints = "; ".join(said.get("hints") or ()) or hint or said.get("expected")
    return Unmet(f"{code}{before}{said['what']}", where=where or said.get("where"), found=said.get("found"), hint=hints)


class NotApplicable(Exception):
    """The subject has nothing that the check is about."""


class State(StrEnum):
    """How a check ended."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Outcome:
    """How a check ended, and why. `error`: an exception that the check did not expect, with its traceback."""

    state: State
    text: str = ""
    error: Exception | None = None


Check = Callable[[SubjectT], None]


class Suite(Generic[SubjectT]):
    """The checks of one kind, by name, in the order in which they are shown, each with what has to pass first."""

    def __init__(self, *parts: Suite[SubjectT]) -> None:
        self.checks: dict[str, tuple[Check[SubjectT], tuple[str, ...]]] = {}
        for part in parts:
            self.checks |= part.checks

    def check(self, *needs: str) -> Callable[[Check[SubjectT]], Check[SubjectT]]:
        """Add a function as a check under its own name, behind the checks it `needs`."""

        def add(function: Check[SubjectT]) -> Check[SubjectT]:
            self.checks[function.__name__] = (function, needs)
            return function

        return add

    def test_class(self, name: str, open_subject: Callable[[Path], SubjectT]) -> type:
        """A class of tests for pytest, a method `test_CHECK` each. The subject is opened once, in an empty folder."""
        import pytest

        opened: dict[type, Examination[SubjectT]] = {}

        def examination(this: Any, tmp_path_factory: pytest.TempPathFactory) -> Examination[SubjectT]:
            if type(this) not in opened:
                opened[type(this)] = Examination(self, open_subject(tmp_path_factory.mktemp("kit")))
            return opened[type(this)]

        def test_of(check: str) -> Callable[[Any, Examination[SubjectT]], None]:
            def test(self: Any, examination: Examination[SubjectT]) -> None:
                __tracebackhide__ = True
                outcome = examination.outcome(check)
                if outcome.error is not None:
                    raise outcome.error
                if outcome.state is State.FAILED:
                    pytest.fail(outcome.text, pytrace=False)
                if outcome.state is State.SKIPPED:
                    pytest.skip(outcome.text)

            test.__name__, test.__doc__ = f"test_{check}", self.checks[check][0].__doc__
            return test

        members: dict[str, Any] = {"__doc__": f"Conformance of {name}.", "examination": pytest.fixture(examination)}
        return type(name, (), members | {f"test_{check}": test_of(check) for check in self.checks})


class Examination(Generic[SubjectT]):
    """The checks of a suite over one subject; each runs once, when it is first asked for."""

    def __init__(self, suite: Suite[SubjectT], subject: SubjectT) -> None:
        self.suite = suite
        self.subject = subject
        self._outcomes: dict[str, Outcome] = {}

    def outcomes(self, names: Iterable[str] | None = None) -> dict[str, Outcome]:
        """How every check (or those named) ended, in order."""
        return {name: self.outcome(name) for name in (names or self.suite.checks)}

    def outcome(self, name: str) -> Outcome:
        """How the check of that name ended. KeyError if there is none."""
        if name not in self._outcomes:
            self._outcomes[name] = self._examine(*self.suite.checks[name])
        return self._outcomes[name]

    def _examine(self, check: Check[SubjectT], needs: tuple[str, ...]) -> Outcome:
        for need in needs:
            first = self.outcome(need)
            if first.state is not State.PASSED:
                why = f"{need} comes first, and fails" if first.state is State.FAILED else first.text
                return Outcome(State.SKIPPED, why)
        try:
            check(self.subject)
        except NotApplicable as reason:
            return Outcome(State.SKIPPED, str(reason))
        except Unmet as found:
            return Outcome(State.FAILED, str(found))
        except Exception as error:  # of the subject's own code: shown by pytest with its traceback
            return Outcome(State.FAILED, f"{type(error).__name__}: {error}", error)
        return Outcome(State.PASSED)
