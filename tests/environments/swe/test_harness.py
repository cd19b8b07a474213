"""What the tools of swe_agent answer, and how test runs are read: functions of text, no processes."""

import pytest

from nemotron_steps.environments.swe import harness as results
from nemotron_steps.environments.swe.grading import HiddenTests
from nemotron_steps.environments.swe.working_copy import Changes

PYTEST = (
    "PASSED t.py::a\nPASSED t.py::b - said\nFAILED t.py::b - why - so\nERROR t.py::c\nSKIPPED [1] d\nXFAIL t.py::e\n"
)
UNITTEST = "test_a (m.T.test_a) ... ok\ntest_b (m.T)\nSays it. ... FAIL\ntest_c (m.T.test_c) ... skipped 'x'\n"


def test_runs_of_both_runners_are_read() -> None:
    run = results.test_run(PYTEST)
    assert run == (frozenset({"t.py::a", "t.py::e"}), frozenset({"t.py::b", "t.py::c", "[1] d"}))
    assert results.test_run(UNITTEST) == (frozenset({"m.T.test_a"}), frozenset({"m.T.test_b", "m.T.test_c"}))
    assert results.test_run("XPASS a\nx PASSED b") == (frozenset(), frozenset({"a"}))
    either = results.test_run(
        "test_d (m.D) ... expected failure\ntest_e (m.E) ... unexpected success\ntest_f (m.F) ... ERROR"
    )
    assert either == (frozenset({"m.D.test_d"}), frozenset({"m.E.test_e", "m.F.test_f"}))


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


def test_changes_are_of_files_or_a_patch() -> None:
    changed = [Changes({"a": "1"}), Changes({"a": None}), Changes(patch="x"), Changes(), Changes(unread="no")]
    assert [bool(each) for each in changed] == [True, True, True, False, False]
