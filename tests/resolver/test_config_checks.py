"""Placeholders and choices: what still has to be filled in, and what is no value of a parameter."""

from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.resolver.checks import (
    check_placeholders,
    is_placeholder,
)
from nemotron_steps.resolver.request import StepConfig
from tests.resolver.worlds import step_of


@pytest.mark.parametrize(
    ("value", "is_one"),
    [
        ("???", True),
        ("/path/to/rows.jsonl", True),
        ("<your model>", True),
        ("todo: a name", True),
        ("????", False),
        ("/real/path/to/rows", False),
        ("<your model>/hf", False),
        ("a TODO", False),
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
    config = StepConfig(values, origin=lambda key: f"f:{key}")
    found = list(check_placeholders(manifest, config, "s", fed))
    assert [problem.hints for problem in found] == [(f"{key}=VALUE",) for key in left]
    assert [problem.where for problem in found] == [f"f:{key}" for key in left]
    assert [problem.found for problem in found if problem.where == "f:l"] == ["???", "/path/to/z"]
    assert list(check_placeholders(manifest, StepConfig({"x": "fine"}), "s", set())) == []
