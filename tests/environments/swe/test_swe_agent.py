import asyncio
from typing import Any

import pytest

from nemotron_steps.environments.base import CannotJudgeError, GradeResult
from nemotron_steps.environments.recorded import regrade
from nemotron_steps.environments.registry import create
from nemotron_steps.environments.responses import message_item
from nemotron_steps.environments.swe import swe_agent
from nemotron_steps.environments.swe.harness import GONE
from tests.environments.swe.tasks import FIX, FIXED, LIBRARIES, bash, rollout, task

RECORDED = {"response": {"output": [message_item("Done.")]}, "reward": 1.0}

pytestmark = pytest.mark.sandbox


@pytest.mark.parametrize("runner", ["unittest", "pytest"])
def test_a_fix_earns_1_and_half_a_fix_nothing(runner: str) -> None:
    answers, verdict = rollout(
        [("view", {"path": "pkg/calc.py", "view_range": [1, 2]}), *FIXED], task(runner), read_only=LIBRARIES
    )
    assert answers == ["1\tdef add(a, b):\n2\t    return a - b\n", "edited pkg/calc.py at line 1"]
    assert (verdict.reward, verdict.components["changed_files"], verdict.components["proved"]) == (1.0, 1.0, 1.0)
    breaking = [bash("sed -i 's/a - b/a + b/' pkg/calc.py")]
    _, broken = rollout(breaking, task(runner), read_only=LIBRARIES)
    assert broken.reward == 0.0 and len(broken.details["not_passed"]) == 1


def test_an_agent_that_changes_nothing_earns_nothing_and_no_test_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: Any) -> None:
        raise AssertionError("the tests ran")

    monkeypatch.setattr(swe_agent.Grader, "grade", refuse)
    for calls in ([], [bash("cat pkg/calc.py")], [("edit", FIX), bash("sed -i 's/a + b/a - b/' pkg/calc.py")]):
        assert rollout(calls)[1].reward == 0.0


def test_the_tools_say_what_is_wrong_with_a_call() -> None:
    calls = [
        ("view", {"path": "nope.py"}),
        ("view", {"path": "pkg"}),
        ("view", {"path": "pkg/calc.py", "view_range": [9, 10]}),
        ("edit", {"path": "pkg/calc.py", "old_str": "return a - b", "new_str": "x"}),
        ("edit", {"path": "pkg", "old_str": "", "new_str": "x"}),
        ("edit", {"path": "pkg/calc.py", "old_str": 3, "new_str": "x"}),
        ("browse", {"url": "x"}),
        bash("echo out; echo err >&2; exit 4"),
        bash("if then"),
        ("edit", {"path": "new/file.py", "old_str": "", "new_str": "y = 1\n"}),
        bash("cat new/file.py"),
    ]
    answers, _ = rollout(calls)
    assert answers[:8] == [
        "error: there is no file nope.py",
        "pkg\npkg/__init__.py\npkg/calc.py",
        "error: pkg/calc.py has lines 1 to 6",
        "error: old_str occurs 2 times in pkg/calc.py, not once",
        "error: it is a folder",
        "error: the argument `old_str` must be a string without null characters",
        "error: no tool is named 'browse'; there are bash, view, edit",
        "out\nerr\n\n[exit code 4]",
    ]
    assert "syntax error" in answers[8]
    assert answers[9:] == ["made new/file.py", "y = 1"]


def test_a_command_that_does_not_end_is_told_and_the_agent_goes_on() -> None:
    answers, verdict = rollout([bash("echo begun; sleep 60"), *FIXED], command_timeout_s=1)
    assert answers[0] == "begun\n\n[stopped after 1 s]" and verdict.reward == 1.0


@pytest.mark.parametrize(
    ("settings", "command", "failure"),
    [
        ({"agent_timeout_s": 1.0}, "sleep 30", "agent_timeout"),
        (
            {"memory_mib": 128},
            "for i in 1 2 3 4; do python3 -c 'import time; x = bytearray(60 << 20); time.sleep(20)' & done; wait",
            "agent_out_of_memory",
        ),
    ],
)
def test_an_agents_used_up_time_and_memory_are_masked(settings: dict[str, Any], command: str, failure: str) -> None:
    with pytest.raises(CannotJudgeError) as refused:
        rollout([*FIXED, bash(command)], **settings)
    assert refused.value.failure == failure


def test_an_agent_that_ends_its_working_copy_has_changed_nothing() -> None:
    answers, verdict = rollout([*FIXED, bash("kill -9 -1"), bash("echo hi")])
    assert answers[1:] == [GONE, GONE] and verdict.reward == 0.0


def test_a_recorded_rollout_is_no_zero_but_cannot_be_judged() -> None:
    async def body() -> GradeResult:
        (graded,) = [each async for each in regrade(create("swe_agent", {}), [({**task(), **RECORDED}, "f:1")])]
        return graded.verdict

    verdict = asyncio.run(body())
    assert (verdict.reward, verdict.failure) == (None, "no_working_copy")
