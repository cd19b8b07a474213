"""The errors about ports and what to paste for each."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemotron_steps.errors import PlanError
from nemotron_steps.manifest.models import Consumes
from nemotron_steps.resolver import hints as reports
from nemotron_steps.resolver.graph import Node
from nemotron_steps.resolver.hints import (
    missing_input_hints,
    missing_stage_input_hints,
    producers_of,
)
from nemotron_steps.resolver.problems import PlanProblem, TypeMismatch, raise_all
from tests.resolver.worlds import World, types_of, world_of

TYPES = types_of(model="", small="model", tiny="small", rows="", sft_chats="rows")
STEPS = {
    "use": "small sft_chats? -> report:rows",
    "a/shrink": "model -> small",
    "b/shrink": "model -> small",
    "c/shrink": "model -> small",
    "d/make": "-> small",
    "prep": "rows -> sft_chats",
    "sink": '[[consumes]]\ntype = "rows"\nrequired = false\n',
}


@pytest.fixture
def world(tmp_path: Path) -> World:
    return world_of(tmp_path, TYPES, STEPS)


def mismatch(world: World, port: str, found: tuple[str, ...], producer: str, where: str | None = None) -> TypeMismatch:
    manifest = world.registry.step("use")
    node = Node("use", manifest, None, (), "")
    return reports.mismatch(world.registry, node, manifest.inputs[port], "it", found, where, producer)


def test_one_problem_is_counted_as_one_and_none_raises_nothing() -> None:
    raise_all([], "cannot plan 'x'")
    for count, said in ((1, "cannot plan 'x': 1 problem, nothing"), (2, "cannot plan 'x': 2 problems, nothing")):
        with pytest.raises(PlanError, match=said):
            raise_all([PlanProblem("it")] * count, "cannot plan 'x'")


HINTED_TYPES = types_of(model="", small="model", tiny="small", raw={"model": "convert/raw"}, rows="", chats="rows")
HINTED_STEPS = {
    "a/tune": "chats model -> out:model",
    "b/init": "chats -> out:model",
    "c/tiny": "chats -> out:tiny",
    "d/small": "chats -> out:small other:small",
    "e/maybe": "chats base:model? -> out:model",
    "convert/raw": "raw -> model",
}


@pytest.fixture
def hinted_world(tmp_path: Path) -> World:
    return world_of(tmp_path, HINTED_TYPES, HINTED_STEPS)


def test_steps_that_make_it_of_something_else_come_first_then_the_nearest_type_then_the_id(
    hinted_world: World,
) -> None:
    assert producers_of(hinted_world.registry, "model", limit=9) == ("b/init", "e/maybe", "d/small", "c/tiny", "a/tune")
    assert producers_of(hinted_world.registry, "model") == ("b/init", "e/maybe")
    assert producers_of(hinted_world.registry, "small") == ("d/small", "c/tiny")
    assert producers_of(hinted_world.registry, "raw") == ()


def test_a_port_of_a_list_is_fed_by_an_input_its_key_or_a_step_before(hinted_world: World) -> None:
    port = Consumes(type="model", bind={"a.b": "", "c": "x"})
    given = missing_input_hints(hinted_world.registry, "model", port, "b/init")
    assert given == ["--input model=PATH", "a.b=PATH", "steps plan e/maybe b/init"]
    many = Consumes(type="small", bind="a", many=True)
    assert missing_input_hints(hinted_world.registry, "m.NAME", many, "x") == [
        "--input m.NAME=PATH",
        "steps plan d/small x",
        "steps plan c/tiny x",
    ]
    assert missing_input_hints(hinted_world.registry, "raw", Consumes(type="raw"), "x") == ["--input raw=PATH"]


def test_a_port_of_a_stage_is_wired_to_the_nearest_stage_before_that_fits(hinted_world: World) -> None:
    step = hinted_world.registry.step
    stages = {"one": step("c/tiny"), "two": step("b/init"), "three": step("convert/raw").with_ports(())}
    before = [Node(name, manifest, None, (), "") for name, manifest in stages.items()]
    port = Consumes(type="model", bind="a.b")
    hints = missing_stage_input_hints(HINTED_TYPES, "model", port, "last", before)
    assert hints == [
        "--input model=PATH",
        "last.a.b=PATH",
        'inputs = { model = "three" }   # in [[stages]] name = "last"',
    ]
    small = missing_stage_input_hints(HINTED_TYPES, "small", Consumes(type="small"), "last", before)
    assert small[1:] == ['inputs = { small = "one" }   # in [[stages]] name = "last"']
    many = Consumes(type="small", bind="a", many=True)
    named = missing_stage_input_hints(HINTED_TYPES, "small.NAME", many, "last", before)
    assert named[1:] == ['inputs = { small.NAME = "one" }   # in [[stages]] name = "last"']
    assert missing_stage_input_hints(HINTED_TYPES, "rows", Consumes(type="rows"), "last", before)[1:] == []
