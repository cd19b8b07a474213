"""Where a port's artifact comes from at the corners: what is shared, looked through, absent or empty."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.errors import PlanError
from nemotron_steps.resolver.plan import Instance, Plan, SuppliedInput
from nemotron_steps.resolver.problems import AbsentInput
from nemotron_steps.resolver.request import Request, request_for_pipeline, request_for_steps
from nemotron_steps.resolver.resolve import resolve
from tests.resolver.worlds import MANY, World, pipeline, problems, types_of, wiring, world_of


def planned(world: World, request: Request, **options: Any) -> Plan:
    return resolve(request, world.registry, compose=world.compose, describe_input=world.describe, **options)


def refused(world: World, request: Request, **options: Any) -> list[Any]:
    with pytest.raises(PlanError) as caught:
        planned(world, request, **options)
    return list(caught.value.problems)


def test_a_step_that_a_config_names_is_the_first_that_was_asked_for(world: World) -> None:
    world.configs["rl", None] = {"inputs": {"prompts": {"step": "prep/prompts"}, "policy": "mega"}}
    stages = ({"name": name, "step": "prep/prompts"} for name in ("one", "two"))
    plan = world.plan_pipeline(pipeline(*stages, {"name": "train", "step": "rl"}))
    assert wiring(plan)["train"]["prompts"] == "one.prompts" and len(plan) == 3


def test_only_a_step_that_converts_is_looked_through(tmp_path: Path) -> None:
    types = types_of(hf={"mega": "up"}, mega={"hf": "down"}, report="")
    steps = {"make": "-> hf", "polish": "hf -> mega", "use": "hf -> report", "up": "hf -> mega", "down": "mega -> hf"}
    world = world_of(tmp_path, types, steps)
    assert wiring(world.plan("make", "polish", "use"))["use"] == {"hf": "down.hf"}
    assert wiring(world.plan("make", "up", "use"))["use"] == {"hf": "make.hf"}


def test_a_step_before_is_no_mismatch_for_an_input_of_many_which_only_lacks_a_name(tmp_path: Path) -> None:
    world = world_of(tmp_path, types_of(hf="", report=""), {"train": "-> hf", "compare": MANY})
    with pytest.raises(PlanError) as caught:
        world.plan("train", "compare")
    (problem,) = caught.value.problems
    assert problem.what == "nothing feeds 'models' of compare"
    assert problem.hints[0] == "--input models.NAME=PATH"


def test_what_is_known_of_an_artifact_at_a_ports_key_is_checked(tmp_path: Path) -> None:
    port = '[[consumes]]\nname = "model"\ntype = "hf"\nbind = "model"\nattributes = { tokenizer = "T1" }\n'
    world = world_of(tmp_path, types_of(hf=""), {"use": port})
    for tokenizer in ("T1", "T2"):
        world.artifacts[tokenizer] = SuppliedInput(tokenizer, "hf", {"tokenizer": tokenizer})
    assert wiring(world.plan("use", overrides=["model=T1"])) == {"use": {"model": "T1"}}
    assert problems(world, "use", overrides=["model=T2"]) == [("E304", "'model' of use needs another tokenizer")]


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


def test_the_port_that_comes_closest_to_the_step_before_is_told_as_its_mismatch(tmp_path: Path) -> None:
    types = types_of(rows="", chats="rows", hf="", report="")
    steps = {"make": "-> rows", "use": "model:hf chats -> report", "look": "-> report", "tune": "chats -> hf"}
    world = world_of(tmp_path, types, steps)
    assert problems(world, "make", "use") == [
        ("E302", "'chats' of use needs chats, and not every rows is one"),
        ("E303", "nothing feeds 'model' of use"),
    ]
    assert problems(world, "look", "use") == [
        ("E301", "'model' of use cannot take report"),
        ("E303", "nothing feeds 'chats' of use"),
    ]


def test_an_input_is_named_with_its_step_where_another_stage_has_it_open_too(world: World) -> None:
    stages = (
        {"name": "one", "step": "rl", "inputs": {"prompts": {"ref": "prompts"}}},
        {"name": "two", "step": "rl", "inputs": {"policy": "one"}},
        {"name": "three", "step": "rlhf", "inputs": {"prompts": {"ref": "prompts"}}},
    )
    found = refused(world, request_for_pipeline(pipeline(*stages)))
    assert [problem.hints[0] for problem in found] == [
        "--input one.policy=PATH",
        "--input prompts=PATH",
        "--input three.policy=PATH",
        "--input judge=PATH",
    ]


def test_a_stage_that_is_not_run_is_planned_as_it_is_where_something_reads_it(world: World) -> None:
    stages = (
        {"name": "data", "step": "prep/prompts"},
        {"name": "first", "step": "rl", "inputs": {"prompts": "data", "policy": {"ref": "mega"}}},
        {"name": "second", "step": "rl", "inputs": {"prompts": "data", "policy": "first"}},
        {"name": "third", "step": "eval", "inputs": {"prompts": "data", "model": "first"}},
    )
    check = {"metric": "reward", "at_least": 0.5}
    instance = Instance("first", {"seed": "1"})
    stages[1]["checks"] = [check]
    request = request_for_pipeline(pipeline(*stages))
    earlier = [replace(goal, earlier=goal.name in ("data", "first")) for goal in request.goals]
    earlier[1] = replace(earlier[1], instance=instance)
    plan = planned(world, replace(request, goals=tuple(earlier)))
    assert [step.key for step in plan] == ["data", "first", "second", "convert/down", "third"]
    assert [step.earlier for step in plan] == [True, True, False, False, False]
    assert wiring(plan)["first"] == {"prompts": "data.prompts", "policy": "mega"}
    assert [len(step.checks) for step in plan] == [0, 1, 0, 0, 0] and plan.goals == ("second", "third")
    assert plan.step("first").because == "an earlier stage of p" and plan.step("first").instance == instance


def test_a_stage_that_is_not_run_takes_many_artifacts_by_name_and_is_no_other_ones_to_feed(tmp_path: Path) -> None:
    steps = {"compare": MANY, "use": "report -> report", "make": "-> hf"}
    world = world_of(tmp_path, types_of(hf="", report=""), steps, artifacts={"x": SuppliedInput("x", "hf")})
    stages = (
        {"name": "make", "step": "make"},
        {"name": "c", "step": "compare", "inputs": {"models.a": "make"}},
        {"name": "use", "step": "use", "inputs": {"report": "c"}},
    )
    request = request_for_pipeline(pipeline(*stages), inputs={"c.models.b": "x"})
    goals = tuple(replace(goal, earlier=goal.name != "use") for goal in request.goals)
    plan = planned(world, replace(request, goals=goals))
    assert wiring(plan)["c"] == {"models.a": "make.hf", "models.b": "x"}
