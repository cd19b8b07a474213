"""What a plan remarks on, and what of its problems is told how."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from nemotron_steps.errors import ConfigError, DataError, PlanError
from nemotron_steps.resolver.plan import SuppliedInput
from nemotron_steps.resolver.request import StepConfig, request_for_pipeline, request_for_steps
from nemotron_steps.resolver.resolve import _for_stage, resolve
from tests.resolver.worlds import World, pipeline, types_of, world_of

GIVEN = """
[[produces]]
name = "one"
type = "hf"
attributes = { tokenizer = "T1" }
[[produces]]
name = "two"
type = "hf"
attributes = { tokenizer = "T2" }
"""
NEEDS = """
[[consumes]]
name = "model"
type = "hf"
attributes = { tokenizer = "T2" }
[[consumes]]
name = "other"
type = "hf"
required = false
[[produces]]
type = "report"
"""


@pytest.fixture
def small(tmp_path: Path) -> World:
    types = types_of(hf="", report="", rows="")
    steps = {
        "make": GIVEN,
        "use": NEEDS,
        "look": '[[consumes]]\ntype = "hf"\nrequired = false\n',
        "rows": "-> rows",
        "report": "hf? -> report",
    }
    world = world_of(tmp_path, types, steps, artifacts={"x": SuppliedInput("x", "hf")})
    eval_step = world.registry.step("report").step.model_copy(update={"category": "eval"})
    evaluation = world.registry.step("report").model_copy(update={"step": eval_step.model_copy(update={"id": "eval"})})
    world.registry.steps["eval"] = evaluation  # type: ignore[index]
    return world


def wired(source: str) -> list[dict[str, object]]:
    inputs = {"model": source, "other": {"ref": "x"}}
    return [{"name": "make", "step": "make"}, {"name": "use", "step": "use", "inputs": inputs}]


def test_each_output_has_the_attributes_that_its_manifest_gives_it(small: World) -> None:
    assert small.plan_pipeline(pipeline(*wired("make.two")))
    with pytest.raises(PlanError) as caught:
        small.plan_pipeline(pipeline(*wired("make.one")))
    assert [problem.found for problem in caught.value.problems] == ["T1"]


def test_what_was_found_wrong_before_is_told_with_the_rest(small: World) -> None:
    known = (ConfigError("both", problems=(DataError("one"), DataError("two"))), DataError("three"))
    with pytest.raises(PlanError) as caught:
        resolve(
            request_for_steps(["use"]),
            small.registry,
            compose=small.compose,
            describe_input=small.describe,
            known=known,
            allow_unfilled=True,
        )
    assert [problem.what for problem in caught.value.problems] == ["one", "two", "three"]


def test_what_nothing_reads_is_remarked_on_but_for_reports_and_the_end(small: World) -> None:
    assert small.plan("rows", "look", "eval", "make").warnings == ("nothing in this plan reads what rows produces",)
    assert small.plan("eval").warnings == () == small.plan("rows").warnings
    assert small.plan("look", "rows").warnings == (), "what makes nothing leaves nothing unread"


def test_variables_that_change_nothing_are_each_named(small: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def compose(step_id: str, config_name: str | None, overrides: Any) -> StepConfig:
        return StepConfig(
            {"hf": {"path": "x"}},
            variables={"hf.path": ("MODEL",), "seed": ("SEED",)},
            idle=(("ONE", "large"), ("TWO", "tiny")),
            origin=lambda key: "file.yaml:1",
        )

    monkeypatch.setattr(small, "compose", compose)
    small.artifacts["y"] = SuppliedInput("y", "hf")
    idle = [
        "ONE is set, and nothing in the config of report reads it (its config large does)",
        "TWO is set, and nothing in the config of report reads it (its config tiny does)",
    ]
    assert list(small.plan("report").warnings) == idle
    given = small.plan("report", inputs={"hf": "y"})
    named = "MODEL is set, but 'hf' of report is y; --input hf=\"$MODEL\" takes it instead"
    assert list(given.warnings) == [named, *idle]


@pytest.mark.parametrize(
    ("hint", "expected"),
    [
        ("a.b=1", "s.a.b=1"),
        ("a=1 b.c=[x,y]", "s.a=1 s.b.c=[x,y]"),
        ("--input a=1", "--input a=1"),
        ("a=1   # or so", "s.a=1   # or so"),
        ("a=1 b", "a=1 b"),
    ],
)
def test_overrides_of_a_stage_are_told_with_its_name(hint: str, expected: str) -> None:
    assert _for_stage(hint, "s") == expected


def test_what_can_be_filled_in_is_no_error_of_a_plan_that_is_only_looked_at(small: World) -> None:
    small.configs["report", None] = {"logs": "/path/to/logs"}
    request = request_for_pipeline(pipeline({"name": "use", "step": "use"}, {"name": "r", "step": "report"}))
    plan = resolve(request, small.registry, compose=small.compose, describe_input=small.describe, allow_unfilled=True)
    assert [each.what for each in plan.unfilled] == [
        "nothing feeds 'model' of use",
        "'logs' of r still has to be filled in",
    ]


def test_overrides_of_a_list_are_for_its_last_step_and_the_config_for_all(small: World) -> None:
    request = request_for_steps(["rows", "use"], config_name="tiny", overrides=["a=1"])
    assert [(goal.step_id, goal.config_name, goal.overrides) for goal in request.goals] == [
        ("rows", "tiny", ()),
        ("use", "tiny", ("a=1",)),
    ]
    assert request.command == "rows use -c tiny" and request.chained
    assert request_for_steps(["rows"]).command == "rows"


def test_a_config_is_flat_under_every_dotted_key() -> None:
    class Group(dict[str, Any]):
        pass

    values: Mapping[str, Any] = {"a": Group(b=1), "c": MappingProxyType({"d": {"e": [{"f": 1}]}}), "g": {}}
    flat = StepConfig(values).flat
    assert {key: flat[key] for key in ("a.b", "c.d.e")} == {"a.b": 1, "c.d.e": [{"f": 1}]}
    assert set(flat) == {"a", "a.b", "c", "c.d", "c.d.e", "g"} and flat["g"] == {}
    assert StepConfig(values).where("a.b") is None
