"""single_step_tool_use_with_argument_comparison: one assistant turn against the recorded next action.

An expected message: any message scores 1. An expected call: the same tool with matching arguments. Several expected
calls: a maximum matching between expected and actual calls, in any order, must cover both; `f1` gives a partial score.
"""

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from nemotron_steps.environments.base import Environment, EnvironmentConfig, GradeResult, Row, RowError, Session
from nemotron_steps.environments.responses import Response, ToolCall, json_of


class SingleStepToolUseConfig(EnvironmentConfig):
    """Settings; thresholds by use: 0.1 default and tool-call schema, 0.3 search pivot, 0.0 SWE pivot."""

    word_count_similarity_threshold: float = Field(0.1, ge=0.0, le=0.5)
    """Over strings of two words and more; identical strings reach 0.5."""
    floating_point_comparison_threshold: float = Field(1e-6, gt=0.0)
    """Numbers that differ by less are the same."""
    parallel_tool_call_reward_mode: Literal["binary", "f1"] = "binary"
    """For several calls: all matched and none extra, or F1 of the matching."""


class SingleStepToolUse(Environment):
    """See the module docstring.

    A row has `expected_action`: `type` is function_call (with `name` and `arguments`) or message (with `content`).
    """

    name: ClassVar[str] = "single_step_tool_use_with_argument_comparison"
    required_fields: ClassVar[tuple[str, ...]] = ("expected_action.type",)
    config_class = SingleStepToolUseConfig
    config: SingleStepToolUseConfig

    def check_values(self, row: Row) -> None:
        action = row["expected_action"]
        if action["type"] == "message":
            return
        if action["type"] not in ("function_call", "function_call_batch"):
            raise RowError("expected_action.type", "message, function_call or function_call_batch", action["type"])
        batch = action.get("calls")
        if not isinstance(batch, list | None) or not all(isinstance(call, dict) for call in batch or ()):
            raise RowError("expected_action.calls", "a list of calls", repr(batch)[:80])
        calls = expected_calls(row)
        if not calls:
            raise RowError("expected_action.calls", "at least one call", "none")
        for call in calls:
            if not call.name or call.parsed_arguments() is None:
                raise RowError("expected_action", "a tool name and a JSON object as arguments", repr(call)[:120])

    async def verify(self, row: Row, response: Response, session: Session) -> GradeResult:
        """The reward, with a `category` naming the outcome."""
        calls = response.tool_calls
        if not calls and not response.text.strip():
            return _verdict(0.0, "no_action")
        if row["expected_action"]["type"] == "message":
            return _verdict(0.0, "unexpected_call") if calls else _verdict(1.0, "expected_message")
        if not calls:
            return _verdict(0.0, "call_missing")
        expected = expected_calls(row)
        problems = [[self._problem(want, call) for call in calls] for want in expected]
        matched = maximum_matching([[problem is None for problem in line] for line in problems])
        if matched == len(expected) == len(calls):
            return _verdict(1.0, "expected_call")
        if self.config.parallel_tool_call_reward_mode == "f1" and len(expected) > 1:
            return _verdict(2 * matched / (len(expected) + len(calls)), "partial_calls")
        if len(expected) != len(calls):
            return _verdict(0.0, "number_of_calls_differs")
        return _verdict(0.0, next(problem for line in problems for problem in line if problem is not None))

    def _problem(self, expected: ToolCall, actual: ToolCall) -> str | None:
        if expected.name != actual.name:
            return "unexpected_tool"
        try:
            arguments = json_of(actual.arguments)
        except (ValueError, RecursionError):
            return "arguments_not_json"
        return argument_problem(json.loads(expected.arguments), arguments, self.config)


def expected_calls(row: Row) -> list[ToolCall]:
    """The calls of a row's expected action."""
    action = row["expected_action"]
    calls = action.get("calls") or [] if action["type"] == "function_call_batch" else [action]
    given = [(str(call.get("name", "")), call.get("arguments", "{}")) for call in calls]
    return [ToolCall(name, text if isinstance(text, str) else json.dumps(text)) for name, text in given]


def argument_problem(expected: Any, actual: Any, config: SingleStepToolUseConfig) -> str | None:
    """Why an argument value does not match the expected one, or None; recursive over objects and lists."""
    if isinstance(expected, bool) != isinstance(actual, bool) or not isinstance(actual, type(expected)):
        return "argument_type_differs"
    if isinstance(expected, dict):
        if set(expected) != set(actual):
            return "argument_keys_differ"
        return _first(argument_problem(expected[key], actual[key], config) for key in expected)
    if isinstance(expected, list):
        if len(expected) != len(actual):
            return "argument_list_length_differs"
        return _first(argument_problem(want, have, config) for want, have in zip(expected, actual, strict=True))
    same = expected == actual
    if isinstance(expected, float):
        same = abs(actual - expected) < config.floating_point_comparison_threshold
    elif isinstance(expected, str) and (similarity := word_similarity(expected, actual)) is not None:
        same = similarity >= config.word_count_similarity_threshold
    return None if same else "argument_value_differs"


def word_similarity(expected: str, actual: str) -> float | None:
    """Sum of the smaller word counts over both totals (0.5 for equal texts), case ignored; None under two words."""
    first, second = Counter(expected.lower().split()), Counter(actual.lower().split())
    if first.total() < 2 or second.total() < 2:
        return None
    return (first & second).total() / (first.total() + second.total())


def maximum_matching(matches: Sequence[Sequence[bool]]) -> int:
    """Size of the largest one-to-one pairing of rows with columns where `matches` holds (augmenting paths)."""
    taken: dict[int, int] = {}

    def augment(row: int, seen: set[int]) -> bool:
        for column, possible in enumerate(matches[row]):
            if possible and column not in seen:
                seen.add(column)
                if column not in taken or augment(taken[column], seen):
                    taken[column] = row
                    return True
        return False

    return sum(augment(row, set()) for row in range(len(matches)))


def _verdict(reward: float, category: str) -> GradeResult:
    return GradeResult(reward, {}, details={"category": category})


def _first(problems: Any) -> str | None:
    return next((problem for problem in problems if problem is not None), None)
