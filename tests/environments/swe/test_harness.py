"""What the tools of swe_agent answer, and how test runs are read: functions of text, no processes."""

from __future__ import annotations

from typing import Any

import pytest

from nemotron_steps.environments.swe import harness as results
from nemotron_steps.environments.swe.grading import HiddenTests
from nemotron_steps.environments.swe.harness import command_text, replaced, view_text
from nemotron_steps.environments.swe.working_copy import Changes
from nemotron_steps.sandbox.base import Outcome, SandboxResult

CONTENT = "a\nb\nc\n"


@pytest.mark.parametrize(
    ("view_range", "shown"),
    [
        (None, "1\ta\n2\tb\n3\tc\n"),
        ([2, 3], "2\tb\n3\tc\n"),
        ([3, -1], "3\tc\n"),
        ([1, 99], "1\ta\n2\tb\n3\tc\n"),
        ([2, 2], "2\tb\n"),
        ([0, 2], "error: x has lines 1 to 3"),
        ([4, -1], "error: x has lines 1 to 3"),
        ([3, 2], "error: x has lines 1 to 3"),
        ([1], "error: view_range must be two integers, the first and the last line"),
        ([1, "2"], "error: view_range must be two integers, the first and the last line"),
        ([True, 2], "error: view_range must be two integers, the first and the last line"),
        (3, "error: view_range must be two integers, the first and the last line"),
    ],
)
def test_view_shows_the_lines_that_were_asked_for(view_range: Any, shown: str) -> None:
    assert view_text("x", CONTENT, view_range) == shown
    assert view_text("x", "", None) == "x is empty"
    assert view_text("x", "a\n\n") == "1\ta\n2\t\n"


def test_edit_changes_the_one_place_and_says_its_line() -> None:
    assert replaced("x", CONTENT, "b\n", "B") == ("a\nBc\n", "edited x at line 2")
    assert replaced("x", CONTENT, "a", "A") == ("A\nb\nc\n", "edited x at line 1")
    assert replaced("x", "aXa", "a", "b") == (None, "error: old_str occurs 2 times in x, not once")
    assert replaced("x", CONTENT, "z", "b") == (None, "error: old_str occurs 0 times in x, not once")


@pytest.mark.parametrize(
    ("outcome", "code", "shown"),
    [
        (Outcome.EXITED, 0, "out\nerr"),
        (Outcome.EXITED, 3, "out\nerr\n\n[exit code 3]"),
        (Outcome.TIMEOUT, None, "out\nerr\n\n[stopped after 7 s]"),
        (Outcome.MEMORY_LIMIT, None, "out\nerr\n\n[stopped by memory limit]"),
    ],
)
def test_a_commands_answer_is_its_output_and_how_it_ended(outcome: Outcome, code: int | None, shown: str) -> None:
    assert command_text(SandboxResult(outcome, code, "out\n", "err\n", 7.2), 100) == shown
    assert command_text(SandboxResult(Outcome.EXITED, 0, "\n", "", 0.0), 100) == "[no output]"


PYTEST = (
    "PASSED t.py::a\nPASSED t.py::b - said\nFAILED t.py::b - why - so\nERROR t.py::c\nSKIPPED [1] d\nXFAIL t.py::e\n"
)
UNITTEST = "test_a (m.T.test_a) ... ok\ntest_b (m.T)\nSays it. ... FAIL\ntest_c (m.T.test_c) ... skipped 'x'\n"


def test_runs_of_both_runners_are_read() -> None:
    run = results.test_run(PYTEST)
    assert run == results.TestRun(frozenset({"t.py::a", "t.py::e"}), frozenset({"t.py::b", "t.py::c", "[1] d"}))
    assert results.test_run(UNITTEST) == results.TestRun(
        frozenset({"m.T.test_a"}), frozenset({"m.T.test_b", "m.T.test_c"})
    )
    assert results.test_run("XPASS a\nx PASSED b") == results.TestRun(frozenset(), frozenset({"a"}))
    either = results.test_run(
        "test_d (m.D) ... expected failure\ntest_e (m.E) ... unexpected success\ntest_f (m.F) ... ERROR"
    )
    assert either == results.TestRun(frozenset({"m.D.test_d"}), frozenset({"m.E.test_e", "m.F.test_f"}))


def test_names_of_tests_are_a_list_or_one_as_json() -> None:
    assert results.tests_of({"F": ["a", "b"]}, "F") == results.tests_of({"F": '["a", "b"]'}, "F") == {"a", "b"}
    assert results.tests_of({"F": ["test_a (m.T)", "test_a (m.T.test_a)", "a::b[c (d)]"]}, "F") == {
        "m.T.test_a",
        "a::b[c (d)]",
    }
    assert results.tests_of({}, "F") == results.tests_of({"F": ""}, "F") == frozenset()
    for wrong in ('{"a": 1}', "[1]", [1], {"a": 1}, "a"):
        with pytest.raises(ValueError):  # json's own among them
            results.tests_of({"F": wrong}, "F")


def test_the_modules_run_are_the_test_files_laid_or_patched() -> None:
    row = {
        "test_files": {"tests/test_a.py": "", "tests/helper.py": "", "tests/data_test.txt": "", "b_test.py": ""},
        "test_patch": "--- a/x\n+++ b/tests/test_c.py\n@@\n--- a/y\n+++ b/src/d.py\n",
    }
    hidden = HiddenTests.of(row, "run {tests}")
    assert hidden.modules == ["b_test.py", "tests/test_a.py", "tests/test_c.py"]
    assert hidden.command == "run {tests}" and HiddenTests.of({"test_command": "x"}, "y").command == "x"


def test_a_digest_is_of_what_counts() -> None:
    one = Changes({"a": "1", "b": None})
    assert one.digest == Changes({"b": None, "a": "1"}, left_out=("c",)).digest
    others = [Changes({"a": "1"}), Changes({"a": "1", "b": ""}), Changes(patch="x"), Changes()]
    assert len({one.digest, *(other.digest for other in others)}) == 5
    assert [bool(other) for other in (*others, Changes(unread="no"))] == [True, True, True, False, False]
