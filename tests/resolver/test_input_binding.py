"""`--input`: which step a bare one is for, and what fits nowhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nemotron_steps.errors import PlanError, StepsError
from nemotron_steps.resolver.plan import SuppliedInput
from nemotron_steps.resolver.request import request_for_pipeline
from tests.resolver.worlds import MANY, World, pipeline, types_of, wiring, world_of


@pytest.fixture
def small(tmp_path: Path) -> World:
    types = types_of(hf={"mega": "up"}, mega="", rows="", report="", judge="hf")
    steps = {
        "train": "rows base:mega? -> model:mega",
        "tune": "rows base:mega -> model:mega",
        "judge": "rows -> judge",
        "compare": MANY,
        "up": "hf -> mega",
        "make": "-> rows",
    }
    return world_of(tmp_path, types, steps, artifacts={name: SuppliedInput(name, name) for name in types.types})


def told(world: World, *steps: str, **inputs: str) -> list[StepsError]:
    with pytest.raises(PlanError) as caught:
        world.plan(*steps, inputs={port.replace("__", "."): ref for port, ref in inputs.items()})
    return list(caught.value.problems)


def test_a_bare_input_goes_to_every_step_that_nothing_before_it_feeds(small: World) -> None:
    plan = small.plan("train", "judge", inputs={"rows": "rows"})
    assert wiring(plan) == {"train": {"rows": "rows"}, "judge": {"rows": "rows"}}
    plan = small.plan("make", "train", inputs={"rows": "rows"})
    assert wiring(plan) == {"make": {}, "train": {"rows": "rows"}}, "the only step that has it, though another feeds it"


def test_an_input_that_each_step_gets_from_another_is_for_none_of_them(small: World) -> None:
    (problem,) = told(small, "make", "train", "judge", rows="rows")
    assert problem.what == "several steps of the request have an input 'rows', and each is fed by another step"
    assert problem.hints == ("--input train.rows=rows", "--input judge.rows=rows")
    plan = small.plan("make", "train", "judge", inputs={"judge.rows": "rows"})
    assert wiring(plan) == {"make": {}, "train": {"rows": "make.rows"}, "judge": {"rows": "rows"}}


def test_an_optional_input_that_would_have_to_be_converted_is_fed_by_nobody(small: World) -> None:
    plan = small.plan("judge", "train", "tune", inputs={"rows": "rows", "base": "mega"})
    assert wiring(plan)["train"]["base"] == "mega"
    assert wiring(plan)["tune"]["base"] == "train.model"


def test_artifacts_of_a_port_of_many_are_for_the_one_step_that_has_it_or_the_one_that_is_named(small: World) -> None:
    plan = small.plan("compare", inputs={"models.a": "hf", "compare.models.b": "judge", "models.c.d": "hf"})
    assert wiring(plan) == {"compare": {"models.a": "hf", "models.c.d": "hf", "models.b": "judge"}} or set(
        wiring(plan)["compare"]
    ) == {"models.a", "models.b", "models.c.d"}
    stages = ({"name": "one", "step": "compare"}, {"name": "two", "step": "compare"})
    plan = small.plan_pipeline(pipeline(*stages), {"one.models.a": "hf", "compare.models.b": "judge"})
    assert wiring(plan) == {
        "one": {"models.a": "hf", "models.b": "judge"},
        "two": {"models.b": "judge"},
    }


def test_an_input_of_a_stage_that_is_not_run_goes_to_what_reads_it(small: World) -> None:
    stages = (
        {"name": "make", "step": "make"},
        {"name": "one", "step": "train", "inputs": {"rows": "make"}},
        {"name": "two", "step": "judge", "inputs": {"rows": "make"}},
    )
    request = request_for_pipeline(pipeline(*stages), inputs={"rows": "rows"})
    with pytest.raises(PlanError) as caught:
        small.resolve(request)
    assert "each is fed by another step" in caught.value.problems[0].what
    first, *rest = request.goals
    plan = small.resolve(replace(request, goals=(replace(first, earlier=True), *rest)))
    assert wiring(plan) == {"one": {"rows": "rows"}, "two": {"rows": "rows"}}
