"""How a mismatch at a port is worded, by what was given for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemotron_steps.errors import PlanError
from nemotron_steps.resolver import hints as reports
from nemotron_steps.resolver.graph import Node
from nemotron_steps.resolver.problems import PlanProblem, TypeMismatch, WrongDirection, raise_all
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
    node = Node("use", manifest, None, (), None, "")
    return reports.mismatch(world.registry, node, manifest.inputs[port], "it", found, where, producer)


def test_what_a_step_made_is_mended_by_a_step_between_that_is_neither_of_them(world: World) -> None:
    found = mismatch(world, "small", ("model",), "a/shrink")
    assert found.hints[0] == "steps plan a/shrink b/shrink use"
    assert not any(" a/shrink a/shrink " in hint or hint == "steps plan a/shrink use" for hint in found.hints)
    assert mismatch(world, "small", ("rows",), "prep").hints[-1].endswith(" use")
    own = mismatch(world, "small", ("sft_chats",), "use").hints
    assert not any(" use use" in hint for hint in own)


def test_any_wider_type_among_several_is_the_wrong_direction(world: World) -> None:
    found = mismatch(world, "small", ("rows", "model"), "x", where="p.toml:3")
    assert isinstance(found, WrongDirection) and found.where == "p.toml:3"
    assert found.what == "'small' of use needs small, and not every model is one"
    assert found.found == "rows or model (small is_a model, not the other way round)"
    assert found.expected == "small (or tiny)"
    assert not isinstance(mismatch(world, "small", ("rows",), "x"), WrongDirection)


def test_one_problem_is_counted_as_one_and_none_raises_nothing() -> None:
    raise_all([], "cannot plan 'x'")
    for count, said in ((1, "cannot plan 'x': 1 problem, nothing"), (2, "cannot plan 'x': 2 problems, nothing")):
        with pytest.raises(PlanError, match=said):
            raise_all([PlanProblem("it")] * count, "cannot plan 'x'")


def test_a_problems_chain_stands_below_its_sentence_and_in_json() -> None:
    problem = PlanProblem("it is wrong", chain=("a.b", "c.d"), where="f:1")
    assert problem.render().splitlines() == ["error[E300]: it is wrong", "  chain:    a.b → c.d", "  --> f:1"]
    assert problem.to_dict()["chain"] == ["a.b", "c.d"] and "problems" not in problem.to_dict()
