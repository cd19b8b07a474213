"""Which steps are named as those that would make what is missing, and how a port can be fed."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemotron_steps.manifest.models import Consumes
from nemotron_steps.resolver.hints import (
    missing_input_hints,
    missing_stage_input_hints,
    producers_of,
)
from tests.resolver.worlds import World, types_of, world_of

TYPES = types_of(model="", small="model", tiny="small", raw={"model": "convert/raw"}, rows="", chats="rows")
STEPS = {
    "a/tune": "chats model -> out:model",
    "b/init": "chats -> out:model",
    "c/tiny": "chats -> out:tiny",
    "d/small": "chats -> out:small other:small",
    "e/maybe": "chats base:model? -> out:model",
    "convert/raw": "raw -> model",
}


@pytest.fixture
def world(tmp_path: Path) -> World:
    return world_of(tmp_path, TYPES, STEPS)


def test_steps_that_make_a_type_of_something_else_come_first_then_the_nearest_type_then_the_id(world: World) -> None:
    assert producers_of(world.registry, "model", limit=9) == ("b/init", "e/maybe", "d/small", "c/tiny", "a/tune")
    assert producers_of(world.registry, "model") == ("b/init", "e/maybe")
    assert producers_of(world.registry, "small") == ("d/small", "c/tiny")
    assert producers_of(world.registry, "raw") == ()


def test_a_port_of_a_list_is_fed_by_an_input_its_key_or_a_step_before(world: World) -> None:
    port = Consumes(type="model", bind={"a.b": "", "c": "x"})
    given = missing_input_hints(world.registry, "model", port, "b/init")
    assert given == ("--input model=PATH", "a.b=PATH", "steps plan e/maybe b/init")
    many = Consumes(type="small", bind="a", many=True)
    assert missing_input_hints(world.registry, "m.NAME", many, "x") == (
        "--input m.NAME=PATH",
        "steps plan d/small x",
        "steps plan c/tiny x",
    )
    assert missing_input_hints(world.registry, "raw", Consumes(type="raw"), "x") == ("--input raw=PATH",)


def test_a_port_of_a_stage_is_wired_to_the_nearest_stage_before_that_fits(world: World) -> None:
    before = {
        "one": world.registry.step("c/tiny"),
        "two": world.registry.step("b/init"),
        "three": world.registry.step("convert/raw").with_ports(()),
    }
    port = Consumes(type="model", bind="a.b")
    hints = missing_stage_input_hints(TYPES, "model", port, "last", before)
    assert hints == (
        "--input model=PATH",
        "last.a.b=PATH",
        'inputs = { model = "three" }   # in [[stages]] name = "last"',
    )
    small = missing_stage_input_hints(TYPES, "small", Consumes(type="small"), "last", before)
    assert small[1:] == ('inputs = { small = "one" }   # in [[stages]] name = "last"',)
    many = Consumes(type="small", bind="a", many=True)
    named = missing_stage_input_hints(TYPES, "small.NAME", many, "last", before)
    assert named[1:] == ('inputs = { small.NAME = "one" }   # in [[stages]] name = "last"',)
    assert missing_stage_input_hints(TYPES, "rows", Consumes(type="rows"), "last", before)[1:] == ()
