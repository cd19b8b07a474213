"""What of a package's test runs makes a task; the runs themselves are told."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace

import pytest

from nemotron_steps.config.schema.swe_tasks import SweTasksConfig
from nemotron_steps.environments.swe.grading import Graded
from nemotron_steps.sandbox.base import Outcome
from nemotron_steps.steps.data_prep.swe.mining import Miner, Task, issue_text, row_of
from nemotron_steps.steps.data_prep.swe.mutations import Mutation
from nemotron_steps.steps.data_prep.swe.packages import Package

PACKAGE = Package("ranges", {"a.py": "x = 1\n"}, {"test_a.py": ""}, "python -m pytest {tests}")
FAULT = Mutation("constant", "a.py", 1, "x = 1", "x = 2", "x = 2\n")


def graded(passed: Iterable[str], outcome: Outcome = Outcome.EXITED, *, output: str = "") -> Graded:
    return Graded(frozenset(passed), outcome=outcome, output=output)


@pytest.fixture
def mined(monkeypatch: pytest.MonkeyPatch):
    """A miner whose runs end as they are told to, one after the other."""

    def miner(*runs: Graded | None) -> Miner:
        told = iter(runs)

        async def run(*_: object, **__: object) -> Graded | None:
            return next(told)

        made = Miner(SweTasksConfig.model_validate({"packages": {"path": "folder"}}))
        monkeypatch.setattr(made, "_run", run)
        return made

    return miner


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (None, "fault_without_end"),
        (graded("a", Outcome.TIMEOUT), "fault_without_end"),
        (graded("a", Outcome.MEMORY_LIMIT), "fault_without_end"),
        (graded("ab"), "fault_unnoticed"),
    ],
)
def test_a_fault_that_makes_no_task_is_counted_by_its_reason(mined, run: Graded | None, reason: str) -> None:
    miner = mined(run)
    assert asyncio.run(miner.task(PACKAGE, FAULT, frozenset("ab"))) is None
    assert miner.refused == {reason: 1}


def test_an_issue_names_some_of_its_tests_and_counts_the_others() -> None:
    assert issue_text("abcde", file=None) == "These tests fail: a, b, c, d, e."
    several = issue_text("abcdefg", file="a.py", error="KeyError: 1")
    assert several == "These tests fail: a, b, c, d, e and 2 more. The fault is in a.py.\n\nKeyError: 1"


@pytest.mark.parametrize(("tell_file", "tell_error"), [(True, True), (False, False)])
def test_a_row_tells_of_its_task_what_the_config_lets_it(tell_file: bool, tell_error: bool) -> None:
    config = SweTasksConfig.model_validate(
        {"packages": {"path": "folder"}, "tell_file": tell_file, "tell_error": tell_error}
    )
    row = row_of(Task(PACKAGE, FAULT, ("t::a",), ("t::b",), "KeyError: 1"), config)
    issue = row["problem_statement"]
    assert row["responses_create_params"]["input"][0]["content"].endswith(issue)
    assert (" in a.py." in issue, "KeyError: 1" in issue) == (tell_file, tell_error)
    assert (row["files"], row["test_files"]) == ({"a.py": "x = 2\n"}, {"test_a.py": ""})
    assert (row["FAIL_TO_PASS"], row["PASS_TO_PASS"]) == (["t::a"], ["t::b"])
    assert "-x = 2\n+x = 1\n" in row["patch"]
    other = row_of(Task(PACKAGE, replace(FAULT, source="x = 3\n"), ("t::a",), (), ""), config)
    assert other["instance_id"] != row["instance_id"] and other["base_commit"] == row["base_commit"]
