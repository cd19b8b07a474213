"""A pipeline is wired as its file says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nemotron_steps.errors import PlanError
from nemotron_steps.resolver.request import request_for_pipeline
from tests.resolver.worlds import World, pipeline, wiring


def test_pipeline_is_wired_as_it_says(world: World) -> None:
    stages = (
        {"name": "data", "step": "prep/prompts"},
        {"name": "first", "step": "rl", "inputs": {"prompts": "data"}},
        {"name": "second", "step": "rl", "inputs": {"prompts": "data.prompts", "policy": "first"}},
        {"name": "check", "step": "eval", "inputs": {"prompts": {"ref": "prompts"}, "model": "first"}},
    )
    plan = world.plan_pipeline(pipeline(*stages), {"policy": "hf"})
    assert wiring(plan) == {
        "data": {},
        "convert/up": {"hf": "hf"},
        "first": {"prompts": "data.prompts", "policy": "convert/up.mega"},
        "second": {"prompts": "data.prompts", "policy": "first.model"},
        "convert/down": {"mega": "first.model"},
        "check": {"model": "convert/down.hf", "prompts": "prompts"},
    }
    assert plan.name == "p" and plan.goals == ("data", "first", "second", "check")
    assert plan.step("first").because == "stage of p"


def test_pipeline_connects_nothing_by_itself(world: World) -> None:
    stages = ({"name": "data", "step": "prep/prompts"}, {"name": "train", "step": "rl"})
    with pytest.raises(PlanError) as raised:
        world.plan_pipeline(pipeline(*stages))
    assert [(p.code, p.hints[0]) for p in raised.value.problems] == [
        ("E303", "--input prompts=PATH"),
        ("E303", "--input policy=PATH"),
    ]


def test_an_input_is_for_the_stage_whose_source_is_an_earlier_one_that_is_not_run(world: World) -> None:
    stages = (
        {"name": "first", "step": "rl", "inputs": {"prompts": {"ref": "prompts"}}},
        {"name": "second", "step": "rl", "inputs": {"prompts": {"ref": "prompts"}, "policy": "first"}},
        {"name": "third", "step": "rl", "inputs": {"prompts": {"ref": "prompts"}, "policy": "second"}},
    )
    request = request_for_pipeline(pipeline(*stages), inputs={"policy": "mega"})
    first, *rest = request.goals
    plan = world.resolve(replace(request, goals=(replace(first, earlier=True), *rest)))
    assert wiring(plan) == {
        "second": {"prompts": "prompts", "policy": "mega"},
        "third": {"prompts": "prompts", "policy": "second.model"},
    }
