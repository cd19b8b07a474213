"""Placeholders and choices: what still has to be filled in, and what is no value of a parameter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.errors import StepsError
from nemotron_steps.resolver.config_checks import (
    check_parameters,
    check_placeholders,
    is_placeholder,
    merge_placeholders,
)
from nemotron_steps.resolver.problems import MissingInput, PlaceholderValue
from nemotron_steps.resolver.request import StepConfig
from tests.resolver.worlds import step_of


@pytest.mark.parametrize(
    ("value", "is_one"),
    [
        ("???", True),
        ("/path/to/rows.jsonl", True),
        ("path/to/rows.jsonl", True),
        ("<your model>", True),
        ("<PATH to rows>", True),
        ("todo: a name", True),
        ("changeme", True),
        ("", False),
        ("????", False),
        ("/real/path/to/rows", False),
        ("/path/too", False),
        ("<a>", False),
        ("<your model>/hf", False),
        ("todos.jsonl", False),
        ("a TODO", False),
        (None, False),
        (3, False),
    ],
)
def test_what_only_stands_for_a_value(value: Any, is_one: bool) -> None:
    assert is_placeholder(value) == is_one


PORTS = """
[[consumes]]
type = "a"
bind = "a.path"
[[consumes]]
type = "b"
bind = { "b.train" = "train.jsonl", "b.val" = "val.jsonl" }
required = false
[[parameters]]
name = "mode"
choices = ["fast", "null", true, 2]
[[parameters]]
name = "gone"
choices = [1]
"""


@pytest.mark.parametrize(
    ("fed", "left"),
    [(set(), ["x", "l", "l", "b.train", "b.val"]), ({"b"}, ["x", "l", "l"]), ({"a", "b"}, ["x", "l", "l"])],
)
def test_what_an_input_fills_in_is_none_and_a_list_may_hold_several(
    fed: set[str], left: list[str], tmp_path: Path
) -> None:
    manifest = step_of(tmp_path, "s", PORTS)
    values = {
        "a": {"path": "???"},
        "b": {"train": "???", "val": "???"},
        "x": "???",
        "l": ["y", "???", ["/path/to/z", 3]],
        "t": {"u": "fine"},
    }
    found = check_placeholders(manifest, StepConfig(values, origin=lambda key: f"f:{key}"), "s", fed)
    assert [problem.hints for problem in found] == [(f"{key}=VALUE",) for key in left]
    assert [problem.where for problem in found] == [f"f:{key}" for key in left]
    assert [problem.found for problem in found if problem.where == "f:l"] == ["???", "/path/to/z"]
    assert check_placeholders(manifest, StepConfig({"x": "fine"}), "s", set()) == []


def placeholder(key: str, step: str, where: str = "f:1", found: str = "???") -> PlaceholderValue:
    what = f"'{key}' of {step} still has to be filled in"
    return PlaceholderValue(what, chain=(step,), where=where, found=found, hints=(f"{step}.{key}=VALUE",))


def test_one_line_that_several_steps_read_is_one_problem_and_any_difference_makes_two() -> None:
    other = MissingInput("nothing feeds it")
    problems: list[StepsError] = [
        placeholder("a", "one"),
        other,
        placeholder("a", "two"),
        placeholder("b", "one"),
        placeholder("a", "one", where="f:2"),
        placeholder("a", "one", found="TODO"),
        placeholder("a", "three"),
    ]
    merged = merge_placeholders(problems)
    assert [problem.what for problem in merged] == [
        "'a' of one, two and three still has to be filled in",
        "nothing feeds it",
        "'b' of one still has to be filled in",
        "'a' of one still has to be filled in",
        "'a' of one still has to be filled in",
    ]
    assert merged[0].hints == ("one.a=VALUE", "two.a=VALUE", "three.a=VALUE")
    assert merged[1] is other and merged[2] is problems[3]


@pytest.mark.parametrize(
    ("value", "fine"),
    [("fast", True), (None, True), (True, True), (2, True), ("slow", False), (1, False), (False, False)],
)
def test_a_value_is_one_of_the_choices(value: Any, fine: bool, tmp_path: Path) -> None:
    manifest = step_of(tmp_path, "s", PORTS)
    found = check_parameters(manifest, StepConfig({"mode": value}, origin=lambda key: "f:3"), "key")
    assert bool(found) != fine
    if found:
        assert found[0].what == "'mode' of key is not one of its choices" and found[0].where == "f:3"
        assert found[0].expected == "fast or null or true or 2"
        assert found[0].hints == ("mode=fast", "mode=null", "mode=true")
        assert found[0].found == ("slow" if value == "slow" else str(value).lower())
