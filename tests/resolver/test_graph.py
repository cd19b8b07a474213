"""The steps of a plan while it is made, and what is remarked on."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemotron_steps.errors import PlanError
from tests.resolver.worlds import pipeline, types_of, wiring, world_of


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
