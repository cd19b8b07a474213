import asyncio
import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemotron_steps.environments.base import GradeResult, Response, Session
from nemotron_steps.environments.registry import create
from nemotron_steps.environments.tools import single_step_tool_use as rule
from nemotron_steps.environments.tools import swe_pivot

NAME = "single_step_tool_use_with_argument_comparison"


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function_call", "name": name, "arguments": json.dumps(arguments)}


def grade(expected: dict[str, Any], output: list[dict[str, Any]], name: str = NAME, **config: Any) -> GradeResult:
    environment = create(name, config)
    row = {"responses_create_params": {"input": "Go."}, "expected_action": expected}
    environment.check_row(row, "f:1")
    return asyncio.run(environment.verify(row, Response.from_output(output), Session()))


MESSAGE = {"type": "message", "role": "assistant", "content": "Hello"}


def test_messages_and_calls_are_told_apart() -> None:
    expected = {"type": "message", "content": "anything"}
    assert grade(expected, [MESSAGE]).reward == 1.0
    assert grade(expected, [call("f")]).reward == 0.0
    assert grade(expected, []).details == {"category": "no_action"}
    assert grade(call("f"), [MESSAGE]).details == {"category": "call_missing"}


@pytest.mark.parametrize(
    ("want", "have", "reward"),
    [
        ({"a": 1}, {"a": 1}, 1.0),
        ({"a": 1}, {"a": 2}, 0.0),
        ({"a": 1}, {"a": "1"}, 0.0),
        ({"a": 1.0}, {"a": 1.0000001}, 1.0),
        ({"a": 1.0}, {"a": 1.1}, 0.0),
        ({"a": 1}, {"a": 1.0}, 0.0),
        ({"a": True}, {"a": 1}, 0.0),
        ({"a": 1}, {"a": 1, "b": 2}, 0.0),
        ({"a": [1, 2]}, {"a": [2, 1]}, 0.0),
        ({"a": {"b": None}}, {"a": {"b": None}}, 1.0),
        ({"a": "word"}, {"a": "Word"}, 0.0),
        ({"a": "two words"}, {"a": "words two"}, 1.0),
        ({"a": "two words"}, {"a": "TWO Others"}, 1.0),
        ({"a": "two"}, {"a": "two words"}, 0.0),
        ({"a": "two words here"}, {"a": "other things here now"}, 1.0),
        ({"a": "two words"}, {"a": "nothing alike"}, 0.0),
        ({"goal": "x", "a": 1}, {"goal": "y", "a": 1}, 0.0),
        ({"goal": "x", "a": 1}, {"a": 1}, 0.0),
    ],
)
def test_arguments(want: dict[str, Any], have: dict[str, Any], reward: float) -> None:
    assert grade(call("f", **want), [call("f", **have)]).reward == reward


def test_wrong_tool_and_broken_arguments() -> None:
    assert grade(call("f"), [call("g")]).details == {"category": "unexpected_tool"}
    broken = {"type": "function_call", "name": "f", "arguments": "{"}
    assert grade(call("f"), [broken]).details == {"category": "arguments_not_json"}
    for mode in ("binary", "f1"):
        twice = grade(call("f"), [call("f"), call("f")], parallel_tool_call_reward_mode=mode)
        assert (twice.reward, twice.details) == (0.0, {"category": "number_of_calls_differs"})
    assert grade({"type": "message"}, [MESSAGE, call("f")]).details == {"category": "unexpected_call"}


def test_several_calls_match_in_any_order() -> None:
    batch = {"type": "function_call_batch", "calls": [call("f", a=1), call("f", a=2), call("g")]}
    assert grade(batch, [call("g"), call("f", a=2), call("f", a=1)]).reward == 1.0
    assert grade(batch, [call("g"), call("f", a=2)]).reward == 0.0
    assert grade(batch, [call("g"), call("f", a=2)], parallel_tool_call_reward_mode="f1").reward == 0.8


@given(st.integers(0, 5).flatmap(lambda n: st.lists(st.lists(st.booleans(), min_size=n, max_size=n), max_size=5)))
def test_matching_equals_brute_force(matches: list[list[bool]]) -> None:
    rows, columns = len(matches), len(matches[0]) if matches else 0
    best = 0
    for chosen in itertools.permutations(list(range(columns)) + [-1] * rows, rows):
        best = max(best, sum(c >= 0 and matches[r][c] for r, c in enumerate(chosen)))
    assert rule.maximum_matching(matches) == best


EDIT = {"command": "str_replace", "path": "/repo/src/foo.py", "old_str": "    return None", "new_str": "    return 1"}


@pytest.mark.parametrize(
    ("want", "have", "gate"),
    [
        (call("str_replace_editor", **EDIT), call("CodeEditor", **{**EDIT, "path": "/other/src/foo.py"}), "none"),
        (call("str_replace_editor", **EDIT), call("bash", command="ls"), "tool"),
        (call("str_replace_editor", **EDIT), call("edit", **{**EDIT, "path": "/repo/src/bar.py"}), "target"),
        (call("str_replace_editor", **EDIT), call("edit", **{**EDIT, "command": "create"}), "target"),
        (call("str_replace_editor", **EDIT), call("edit", **{**EDIT, "new_str": "    raise KeyError"}), "similarity"),
        (call("bash", command="pytest /r/t/test_a.py"), call("shell", cmd="pytest /r/t/test_a.py -x"), "none"),
        (call("bash", command="pytest /r/t/test_a.py"), call("bash", command="pytest /r/t/test_b.py"), "target"),
        (call("bash", command="cd /a && make all tests"), call("bash", command="cd /a"), "similarity"),
        (call("finish"), call("submit"), "none"),
        (call("unheard_of"), call("Unheard_Of"), "none"),
        (
            call("view", command="view", path="a/b", view_range=[1, 10]),
            call("view", path="a/b", view_range=[90, 95]),
            "none",
        ),
        (
            call("edit", command="view", path="a/b", view_range=[1, 11]),
            call("edit", command="view", path="a/b", view_range=[5, 11]),
            "target",
        ),
    ],
)
def test_swe_pivot_gates(want: dict[str, Any], have: dict[str, Any], gate: str) -> None:
    verdict = grade(want, [have], name="swe_pivot")
    assert verdict.details == {"gate": gate}
    assert verdict.reward == float(gate == "none")


@pytest.mark.parametrize(
    ("seen", "wanted", "enough"),
    [
        ([1, 11], [1, 11], True),
        ([1, 9], [1, 11], True),
        ([1, 8], [1, 11], False),
        ([3, 20], [1, 11], True),
        ([4, 20], [1, 11], False),
        (None, [1, 11], True),
        ([1, 2], None, True),
    ],
)
def test_a_view_shows_four_fifths_of_the_wanted_lines(seen: Any, wanted: Any, enough: bool) -> None:
    path = {"command": "view", "path": "a/b.py"}
    assert swe_pivot.same_target("edit", {**path, "view_range": wanted}, {**path, "view_range": seen}) is enough


def test_edits_are_as_alike_as_the_worse_of_place_and_change() -> None:
    def alike(want: dict[str, Any], have: dict[str, Any]) -> float:
        return swe_pivot.similarity("edit", want, have)

    assert alike({"old_str": "abcd", "new_str": "x"}, {"old_str": "abcd", "new_str": "x"}) == 1.0
    assert alike({"old_str": "abcd", "new_str": "x"}, {"old_str": "abcd", "new_str": "y"}) == 0.0
    assert alike({"old_str": "abcd", "new_str": "x"}, {"old_str": "abxx", "new_str": "x"}) == 0.5
    assert alike({"content": "abcd"}, {"file_text": "abxx"}) == 0.5
    assert alike({"content": "abcd"}, {"old_str": "abcd"}) == 0.0
    assert swe_pivot.similarity("bash", {"command": "abcd"}, {"cmd": "abxx"}) == 0.5
    assert swe_pivot.similarity("read", {"path": "a"}, {"path": "b"}) == 1.0
    limit = swe_pivot.COMPARED_CHARACTERS
    assert swe_pivot.text_similarity("a" * limit + "b", "a" * limit + "c") == 1.0
    assert swe_pivot.text_similarity("", "") == 1.0
    assert [swe_pivot.category_of(name) for name in ("Str_Replace_Editor", "strReplaceEditor", "what")] == [
        "edit", "edit", None,
    ]  # fmt: skip
