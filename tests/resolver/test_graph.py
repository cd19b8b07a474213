"""Nodes of a plan: what makes two of them one, what a config keeps, and which conversions are shared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.errors import ConfigError, DataError, PlanError
from nemotron_steps.resolver.graph import Graph, Node
from nemotron_steps.resolver.plan import SuppliedInput
from nemotron_steps.resolver.request import StepConfig
from tests.resolver.worlds import World, pipeline, step_of, types_of, wiring, world_of

PORT = '[[consumes]]\ntype = "rows"\nbind = "rows"\ninstead_of = ["path", "blend", "gone"]\n'


@pytest.mark.parametrize(
    ("overrides", "fed", "values"),
    [
        ((), True, {"path": None, "blend": None, "seed": 1}),
        (("++blend=mine",), True, {"path": None, "blend": "b", "seed": 1}),
        (("+path=mine",), True, {"path": "a", "blend": None, "seed": 1}),
        ((), False, {"path": "a", "blend": "b", "seed": 1}),
    ],
)
def test_keys_that_an_input_stands_for_are_null_but_for_overridden_ones(
    overrides: tuple[str, ...], fed: bool, values: dict[str, Any], tmp_path: Path
) -> None:
    config = StepConfig({"path": "a", "blend": "b", "seed": 1})
    node = Node("k", step_of(tmp_path, "prep", PORT), None, overrides, config, "")
    if fed:
        node.inputs["rows"] = SuppliedInput("x")
    assert node.planned(None).config == values
    assert Node("k", node.manifest, None, (), None, "").planned(None).config == {}


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


def test_a_converter_is_entered_at_the_input_it_needs_and_left_at_the_output_that_fits(tmp_path: Path) -> None:
    types = types_of(hf={"mega": "up"}, mega="", large="mega", report="")
    steps = {"use": "mega -> report", "up": "log:report? hf -> note:report model:large"}
    world = world_of(tmp_path, types, steps, artifacts={"hf": SuppliedInput("hf", "hf")})
    plan = world.plan("use", inputs={"mega": "hf"})
    assert wiring(plan) == {"up": {"hf": "hf"}, "use": {"mega": "up.model"}}


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
