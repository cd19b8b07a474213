"""The steps of a plan while it is made, and what is remarked on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.errors import ConfigError, DataError, PlanError
from nemotron_steps.resolver.graph import Graph
from nemotron_steps.resolver.plan import SuppliedInput
from nemotron_steps.resolver.request import StepConfig, request_for_pipeline
from nemotron_steps.resolver.resolve import resolve
from tests.resolver.worlds import World, pipeline, types_of, wiring, world_of


def test_an_error_is_noted_once_and_one_of_several_taken_apart(world: World) -> None:
    noted: list[Any] = []
    graph = Graph(world.registry, world.compose, noted)
    one, other = DataError("one"), DataError("other")
    for error in (one, ConfigError("both", problems=(one, other)), one):
        graph.report(error)
    assert noted == [one, other]


def test_outputs_are_converted_each_by_itself_and_each_way_once(tmp_path: Path) -> None:
    types = types_of(hf={"mega": "up", "gguf": "export"}, mega="", gguf="")
    steps = {
        "two": "-> first:hf second:hf",
        "use": "a:mega b:mega c:gguf d:mega -> mega",
        "up": "hf -> mega",
        "export": "hf -> gguf",
    }
    wired = {"a": "two.first", "b": "two.second", "c": "two.first", "d": "two.first"}
    stages = ({"name": "two", "step": "two"}, {"name": "use", "step": "use", "inputs": wired})
    plan = world_of(tmp_path, types, steps).plan_pipeline(pipeline(*stages))
    assert wiring(plan) == {
        "two": {},
        "up": {"hf": "two.first"},
        "up#2": {"hf": "two.second"},
        "export": {"hf": "two.first"},
        "use": {"a": "up.mega", "b": "up#2.mega", "c": "export.gguf", "d": "up.mega"},
    }


def test_a_circle_is_told_in_the_direction_in_which_artifacts_go(tmp_path: Path) -> None:
    steps = {"a": "t -> t", "b": "t -> t", "c": "t -> t"}
    configs = {(key, None): {"inputs": {"t": {"step": source}}} for key, source in ("ab", "bc", "ca")}
    with pytest.raises(PlanError) as caught:
        world_of(tmp_path, types_of(t=""), steps, configs=configs).plan("a")
    (problem,) = caught.value.problems
    assert problem.chain == ("a", "c", "b", "a")  # type: ignore[attr-defined]
    assert sorted(problem.hints) == ["steps show a", "steps show b", "steps show c"]
    assert problem.what == "the inputs of a come, in the end, from itself"


def test_each_problem_of_a_config_is_told_with_its_step_where_there_are_two(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    compose = world.compose

    def composing(step_id: str, config_name: str | None, overrides: Any) -> StepConfig:
        if step_id == "rl":
            raise ConfigError(
                "both", problems=(ConfigError("a is wrong", hints=("a=1",)), ConfigError("b of rl is wrong"))
            )
        return compose(step_id, config_name, overrides)

    monkeypatch.setattr(world, "compose", composing)
    for steps, whats in (
        (("rl",), ["a is wrong", "b of rl is wrong"]),
        (("prep/prompts", "rl"), ["rl: a is wrong", "b of rl is wrong"]),
    ):
        with pytest.raises(PlanError) as caught:
            world.plan(*steps)
        assert [problem.what for problem in caught.value.problems] == whats
    stages = ({"name": "data", "step": "prep/prompts"}, {"name": "train", "step": "rl"})
    with pytest.raises(PlanError) as caught:
        world.plan_pipeline(pipeline(*stages))
    assert caught.value.problems[0].hints == ("train.a=1",)


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


def test_what_can_be_filled_in_is_no_error_of_a_plan_that_is_only_looked_at(small: World) -> None:
    small.configs["report", None] = {"logs": "/path/to/logs"}
    request = request_for_pipeline(pipeline({"name": "use", "step": "use"}, {"name": "r", "step": "report"}))
    plan = resolve(request, small.registry, compose=small.compose, describe_input=small.describe, allow_unfilled=True)
    assert [each.what for each in plan.unfilled] == [
        "nothing feeds 'model' of use",
        "'logs' of r still has to be filled in",
    ]
