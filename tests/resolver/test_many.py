"""Ports that take several artifacts: named by the request or by the config, and constraints over all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemotron_steps.errors import PlanError
from nemotron_steps.resolver.plan import SuppliedInput
from tests.resolver.worlds import World, pipeline, types_of, wiring, world_of

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


def test_a_constraint_on_a_port_that_takes_many_is_one_on_each(world: World) -> None:
    with pytest.raises(PlanError) as caught:
        world.plan("distil", inputs={"policy": "p", "teachers.mine": "a", "teachers.odd": "other"})
    (problem,) = caught.value.problems
    assert problem.code == "E304" and "another tokenizer" in problem.what
    assert problem.expected == "teachers.odd.tokenizer = T (as policy.tokenizer)" and problem.found == "U"
    assert problem.hints == ("--input teachers.odd=PATH   # another one",)


def test_what_feeds_a_port_that_takes_many_is_told_under_a_name(world: World) -> None:
    with pytest.raises(PlanError) as caught:
        world.plan("distil", inputs={"policy": "p"})
    (problem,) = caught.value.problems
    assert problem.hints[0].endswith("--input teachers.NAME=PATH") and "teachers=PATH" not in problem.hints
    with pytest.raises(PlanError) as caught:
        world.plan_pipeline(pipeline({"name": "a", "step": "train"}, {"name": "b", "step": "distil"}), {"policy": "p"})
    (problem,) = caught.value.problems
    assert problem.hints[1:] == ('inputs = { teachers.NAME = "a" }   # in [[stages]] name = "b"',)
