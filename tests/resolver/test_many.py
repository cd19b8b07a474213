"""Ports that take several artifacts: named by the request or by the config, and constraints over all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemotron_steps.errors import PlanError
from nemotron_steps.resolver.plan import SuppliedInput
from tests.resolver.worlds import World, pipeline, problems, types_of, wiring, world_of

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
def world(tmp_path: Path) -> World:
    steps = {"distil": DISTIL, "train": " -> model:mega", "convert/up": "hf -> mega"}
    types = types_of(mega="", hf={"mega": "convert/up"})
    given = {
        name: SuppliedInput(name, kind, {"tokenizer": tokenizer})
        for name, kind, tokenizer in (("p", "mega", "T"), ("a", "mega", "T"), ("b", "hf", "T"), ("other", "mega", "U"))
    }
    return world_of(tmp_path, types, steps, artifacts=given)


def test_a_config_names_the_artifacts_of_a_port_that_takes_many(world: World) -> None:
    sources = {"one": {"step": "train", "config": "x"}, "two": "b"}
    world.configs["distil", None] = {"inputs": {"policy": "p", "teachers": sources}}
    world.configs["train", "x"] = {}
    assert wiring(world.plan("distil")) == {
        "train": {},
        "convert/up": {"hf": "b"},
        "distil": {"policy": "p", "teachers.one": "train.model", "teachers.two": "convert/up.mega"},
    }


def test_what_the_request_names_takes_the_place_of_what_the_config_does(world: World) -> None:
    world.configs["distil", None] = {"inputs": {"policy": "p", "teachers": {"one": "b"}}}
    plan = world.plan("distil", inputs={"teachers.mine": "a"})
    assert wiring(plan) == {"distil": {"policy": "p", "teachers.mine": "a"}}


@pytest.mark.parametrize("source", ["a", {"ref": "a"}, {"step": "train"}])
def test_a_source_without_a_name_is_none_for_a_port_that_takes_many(source: object, world: World) -> None:
    unnamed = [("E305", "'teachers' of distil takes several artifacts, each under a name")]
    world.configs["distil", None] = {"inputs": {"policy": "p", "teachers": source}}
    assert problems(world, "distil") == unnamed
    world.configs["distil", None] = {"inputs": {"policy": "p"}}
    assert problems(world, "distil", inputs={"teachers": "a"}) == unnamed
    stages = ({"name": "train", "step": "train"}, {"name": "d", "step": "distil", "inputs": {"teachers": "train"}})
    with pytest.raises(PlanError) as caught:
        world.plan_pipeline(pipeline(*stages))
    (problem,) = caught.value.problems
    assert (problem.expected, problem.found) == ("inputs.teachers.NAME", "no name")


def test_a_step_before_in_a_list_gives_a_port_that_takes_many_no_name(world: World) -> None:
    found = problems(world, "train", "distil")
    assert found == [("E303", "nothing feeds 'teachers' of distil")]
    plan = world.plan("train", "distil", inputs={"teachers.mine": "a"})
    assert wiring(plan)["distil"] == {"policy": "train.model", "teachers.mine": "a"}


def test_an_artifact_that_is_wired_and_given_under_one_name_is_the_given_one(world: World) -> None:
    wired = {"policy": {"ref": "p"}, "teachers.x": "train", "teachers.y": {"ref": "b"}}
    stages = ({"name": "train", "step": "train"}, {"name": "d", "step": "distil", "inputs": wired})
    plan = world.plan_pipeline(pipeline(*stages), {"d.teachers.x": "a", "teachers.z": "a"})
    assert wiring(plan)["d"] == {"policy": "p", "teachers.x": "a", "teachers.y": "convert/up.mega", "teachers.z": "a"}


def test_a_constraint_on_a_port_that_takes_many_is_one_on_each(world: World) -> None:
    with pytest.raises(PlanError) as caught:
        world.plan("distil", inputs={"policy": "p", "teachers.mine": "a", "teachers.odd": "other"})
    (problem,) = caught.value.problems
    assert problem.code == "E304" and "another tokenizer" in problem.what
    assert problem.expected == "teachers.odd.tokenizer = T (as policy.tokenizer)" and problem.found == "U"
    assert problem.hints == ("--input teachers.odd=PATH   # another one",)
