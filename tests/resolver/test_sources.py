"""Where a port's artifact comes from."""

from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.errors import PlanError
from nemotron_steps.resolver.plan import Plan, SuppliedInput
from nemotron_steps.resolver.problems import AbsentInput
from nemotron_steps.resolver.request import Request, request_for_steps
from nemotron_steps.resolver.resolve import resolve
from tests.resolver.worlds import World, pipeline, types_of, wiring, world_of


def planned(world: World, request: Request, **options: Any) -> Plan:
    return resolve(request, world.registry, compose=world.compose, describe_input=world.describe, **options)


def refused(world: World, request: Request, **options: Any) -> list[Any]:
    with pytest.raises(PlanError) as caught:
        planned(world, request, **options)
    return list(caught.value.problems)


def test_an_artifact_that_is_not_here_is_an_error_and_part_of_a_plan_that_is_only_looked_at(world: World) -> None:
    world.artifacts["mega"] = SuppliedInput("mega", "mega", absent=AbsentInput("its weights are not here"))
    request = request_for_steps(["rl"], inputs={"prompts": "prompts", "policy": "mega"})
    (problem,) = refused(world, request)
    assert (problem.what, problem.where) == ("its weights are not here", "--input policy=mega")
    plan = planned(world, request, allow_unfilled=True)
    assert wiring(plan) == {"rl": {"prompts": "prompts", "policy": "mega"}}
    assert [each.what for each in plan.unfilled] == ["its weights are not here"]
    world.artifacts["mega"] = SuppliedInput("mega", "report", absent=AbsentInput("its weights are not here"))
    assert [each.code for each in refused(world, request, allow_unfilled=True)] == ["E301"], "which no filling in mends"


DISTIL = """
[[consumes]]
name = "policy"
type = "mega"
bind = "policy"
[[consumes]]
name = "teachers"
type = "mega"
many = true
bind = "teachers"
[[produces]]
name = "model"
type = "mega"
[[constraints]]
description = "a teacher has another tokenizer"
same = ["policy.tokenizer", "teachers.tokenizer"]
"""


@pytest.fixture
def many_world(tmp_path: Path) -> World:
    steps = {"distil": DISTIL, "train": " -> model:mega", "convert/up": "hf -> mega"}
    types = types_of(mega="", hf={"mega": "convert/up"})
    given = {
        name: SuppliedInput(name, kind, {"tokenizer": tokenizer})
        for name, kind, tokenizer in (("p", "mega", "T"), ("a", "mega", "T"), ("b", "hf", "T"), ("other", "mega", "U"))
    }
    return world_of(tmp_path, types, steps, artifacts=given)


def test_a_config_names_the_artifacts_of_a_port_that_takes_many(many_world: World) -> None:
    sources = {"one": {"step": "train", "config": "x"}, "two": "b"}
    many_world.configs["distil", None] = {"inputs": {"policy": "p", "teachers": sources}}
    many_world.configs["train", "x"] = {}
    assert wiring(many_world.plan("distil")) == {
        "train": {},
        "convert/up": {"hf": "b"},
        "distil": {"policy": "p", "teachers.one": "train.model", "teachers.two": "convert/up.mega"},
    }


def test_an_artifact_that_is_wired_and_given_under_one_name_is_the_given_one(many_world: World) -> None:
    wired = {"policy": {"ref": "p"}, "teachers.x": "train", "teachers.y": {"ref": "b"}}
    stages = ({"name": "train", "step": "train"}, {"name": "d", "step": "distil", "inputs": wired})
    plan = many_world.plan_pipeline(pipeline(*stages), {"d.teachers.x": "a", "teachers.z": "a"})
    assert wiring(plan)["d"] == {"policy": "p", "teachers.x": "a", "teachers.y": "convert/up.mega", "teachers.z": "a"}


def test_a_constraint_on_a_port_that_takes_many_is_one_on_each(many_world: World) -> None:
    with pytest.raises(PlanError) as caught:
        many_world.plan("distil", inputs={"policy": "p", "teachers.mine": "a", "teachers.odd": "other"})
    (problem,) = caught.value.problems
    assert problem.code == "E304" and "another tokenizer" in problem.what
    assert problem.expected == "teachers.odd.tokenizer = T (as policy.tokenizer)" and problem.found == "U"
    assert problem.hints == ("--input teachers.odd=PATH   # another one",)
