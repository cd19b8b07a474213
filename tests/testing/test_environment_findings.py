"""What the checks of an environment look at: every row, every kind of answer, every call. The environment is told."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest

from nemotron_steps.environments.base import Environment, EnvironmentConfig, GradeResult, Response, Session
from nemotron_steps.environments.responses import ToolCall
from nemotron_steps.testing import environment as kit
from nemotron_steps.testing.environment_subject import EnvironmentSubject, judged, plain
from nemotron_steps.testing.suite import Unmet

ROWS: list[dict[str, Any]] = [{"responses_create_params": {"input": "q"}, "n": n} for n in (1, 2, 3)]


class Told(Environment):
    """Earns what a function of row and text says; notes what is done with it."""

    name: ClassVar[str] = "told"

    def __init__(self, earns: Any = lambda row, text: 1.0) -> None:
        super().__init__(EnvironmentConfig(), {})
        self.earns = earns
        self.done: list[str] = []

    async def start(self) -> None:
        self.done.append("start")

    async def close(self) -> None:
        self.done.append("close")

    async def seed(self, row: Any) -> Session:
        return Session(tools=[{"name": "add"}])

    async def call_tool(self, session: Session, name: str, arguments: dict[str, Any]) -> str:
        self.done.append(f"{name} {json.dumps(arguments)}")
        return "3"

    async def release(self, session: Session) -> None:
        self.done.append("release")

    async def verify(self, row: Any, response: Response, session: Session) -> GradeResult:
        found = self.earns(row, response.text)
        return found if isinstance(found, GradeResult) else GradeResult(found)


def subject(environment: Told | None = None, **settings: Any) -> Any:
    """A subject over the rows, whose environment this is each time."""
    made: Any = EnvironmentSubject("told", ROWS, lambda row: "right", **settings)
    made.__dict__["found"] = Told
    made.build = lambda: environment or Told()
    return made


@pytest.mark.parametrize(("row", "answer"), [(1, "right"), (2, "right"), (1, "fine"), (3, "fine")])
def test_a_verdict_that_changes_is_found_on_any_row_and_for_any_answer(row: int, answer: str) -> None:
    times = iter(range(99))

    def earns(given: Any, text: str) -> float:
        return next(times) / 100 if (given["n"], text) == (row, answer) else 0.0

    kit.judging_is_deterministic(subject())
    with pytest.raises(Unmet, match="two verdicts"):
        kit.judging_is_deterministic(subject(Told(earns)))


def test_verdicts_that_differ_from_row_to_row_are_no_state() -> None:
    kit.it_keeps_no_state(subject(Told(lambda row, text: row["n"] / 4)))
    kit.concurrent_is_serial(subject(Told(lambda row, text: row["n"] / 4)))


def test_only_sleeping_in_the_loop_is_found_and_sleep_is_what_it_was() -> None:
    sleep = time.sleep

    def elsewhere(row: Any, text: str) -> float:
        thread = threading.Thread(target=lambda: time.sleep(0.001))
        thread.start()
        thread.join()
        return 1.0

    def here(row: Any, text: str) -> float:
        time.sleep(0.001)
        return 1.0

    kit.it_never_sleeps_in_the_loop(subject(Told(elsewhere)))
    with pytest.raises(Unmet, match=r"sleeps 0\.001 s"):
        kit.it_never_sleeps_in_the_loop(subject(Told(here)))
    assert time.sleep is sleep


def test_an_environment_is_closed_before_it_was_started_and_twice() -> None:
    environment = Told()
    kit.it_can_be_closed(subject(environment))
    assert environment.done == ["close", "start", "close", "close"]


@pytest.mark.parametrize(
    "raises",
    [
        lambda name, arguments: name == "no_such_tool",
        lambda name, arguments: name == "add" and arguments == {},
        lambda name, arguments: "no_such_argument" in arguments,
        lambda name, arguments: arguments.get("a", 1) is None,
        lambda name, arguments: arguments.get("b") == "\ud800",
        lambda name, arguments: len(str(arguments.get("b"))) > 50_000,
    ],
)
def test_a_tool_is_called_in_every_wrong_way(raises: Any) -> None:
    class Raises(Told):
        async def call_tool(self, session: Session, name: str, arguments: dict[str, Any]) -> str:
            if broken and raises(name, arguments):
                raise KeyError(name)
            return "error: what?"

        async def seed(self, row: Any) -> Session:
            properties = {key: {"type": "number"} for key in "ab"}
            return Session(tools=[{"name": "add", "parameters": {"type": "object", "properties": properties}}])

    broken = False
    kit.tool_mistakes_are_told_to_the_policy(subject(Raises()))
    broken = True
    with pytest.raises(Unmet, match="raises KeyError"):
        kit.tool_mistakes_are_told_to_the_policy(subject(Raises()))


def test_the_arguments_of_a_call_are_of_the_types_that_its_schema_says() -> None:
    types = ("string", "integer", "number", "boolean", "array", "object", None)
    tool = {"parameters": {"properties": {str(kind): {"type": kind} for kind in types}}}
    found = kit._some_arguments(tool)
    assert [type(value) for value in found.values()] == [str, int, float, bool, list, dict, str]


@pytest.mark.parametrize(
    ("right", "worst", "met"),
    [
        (1.0, 0.0, True),
        (0.5, None, True),
        (0.0, 0.0, False),
        (0.0, 0.5, False),
        (None, 0.0, False),
        (None, None, False),
    ],
)
def test_the_right_answer_of_each_row_earns_more_than_none(right: Any, worst: Any, met: bool) -> None:
    def earns(row: Any, text: str) -> GradeResult:
        reward = (right if text else worst) if row["n"] == 3 else float(bool(text))
        return GradeResult(reward) if reward is not None else GradeResult.failed("lost")

    if met:
        kit.right_answers_earn_most(subject(Told(earns)))
    else:
        with pytest.raises(Unmet, match="right answer of row 3"):
            kit.right_answers_earn_most(subject(Told(earns)))


@pytest.mark.parametrize("wrong", kit._WRONG)
def test_a_field_of_any_other_type_that_cannot_be_judged_is_found(wrong: Any) -> None:
    def earns(row: Any, text: str) -> float:
        if type(row["n"]) is type(wrong) and row["n"] == wrong:
            raise KeyError("n")
        return 1.0

    kit.a_wrong_field_is_told(subject())
    with pytest.raises(Unmet, match="is accepted: verify_failed"):
        kit.a_wrong_field_is_told(subject(Told(earns)))


def test_rows_may_lie_in_a_file_with_blank_lines(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n\n" for row in ROWS))
    assert EnvironmentSubject("told", file, str).rows == EnvironmentSubject("told", str(file), str).rows == ROWS


def test_a_rollout_calls_the_offered_tools_with_what_can_be_read_and_releases_its_session() -> None:
    environment = Told()
    calls = [ToolCall("add", '{"a": 1}'), ToolCall("other", "{}"), ToolCall("add", "[1]"), ToolCall("add", "")]
    responses = [Response("x", tool_calls=calls), Response("y")]
    asyncio.run(judged(environment, ROWS[0], *responses))
    assert environment.done == ['add {"a": 1}', "add {}", "release", "release"]


def test_a_fresh_environment_is_closed_and_rows_are_copied() -> None:
    def changing(row: Any, text: str) -> float:
        row["n"] = 9
        return 1.0

    environment = Told(changing)
    subject(environment).judge(ROWS[0], "x")
    assert environment.done == ["start", "release", "close"] and ROWS[0]["n"] == 1


def test_an_answer_has_company_where_groups_are_judged() -> None:
    class Comparing(Told):
        judges_groups = True

    for made, answers, verdicts in ((Told, 1, 1), (Comparing, 1, 2), (Comparing, 3, 3)):
        assert len(subject(made()).judge(ROWS[0], *["x"] * answers)) == verdicts


@pytest.mark.parametrize(
    ("verdict", "found"),
    [
        (GradeResult(0.0), None),
        (GradeResult.failed("judge_unavailable"), None),
        (GradeResult.failed("verify_failed", traceback=f"{300 * 'a'}\nb\nc\n"), r"found: a{296}\nb\nc\n"),
        (GradeResult.failed("verdict_invalid"), "verdict_invalid"),
        (GradeResult(7.0), "reward_out_of_range"),
    ],
)
def test_a_mistake_of_the_environment_is_told_as_one(verdict: GradeResult, found: str | None) -> None:
    made = subject(Told(lambda row, text: verdict))
    if found is None:
        assert made.verdict(ROWS[0], "x", "an answer").failure == verdict.failure
    else:
        with pytest.raises(Unmet, match=found):
            made.verdict(ROWS[0], "x", "an answer")


def test_two_verdicts_are_the_same_by_reward_components_and_failure() -> None:
    one = GradeResult(1.0, {"a": 1.0}, details={"x": 1})
    others = [GradeResult(1.0, {"a": 2.0}), GradeResult(0.5, {"a": 1.0}), GradeResult(None, {"a": 1.0}, "lost")]
    assert plain(one) == plain(GradeResult(1.0, {"a": 1.0})) and plain(one) not in [plain(other) for other in others]
