"""What is told with a problem, and which steps are named as those that make what is needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemotron_steps.errors import PlanError
from nemotron_steps.resolver.hints import producers_of
from nemotron_steps.resolver.problems import PlanProblem, raise_all
from tests.resolver.worlds import World, types_of, world_of


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
