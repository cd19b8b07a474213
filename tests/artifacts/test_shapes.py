"""Records have the fields they must have and nothing else; what is wrong is told by the first field that is."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from nemotron_steps.artifacts.records import ANY, COUNT, DIGEST, NUMBER, TEXT, TIME, Optional, Values, require_shape
from nemotron_steps.errors import ArtifactError

RUN = {"name": TEXT, "steps": [{"key": TEXT, "seconds": Optional(NUMBER)}], "made": Values(COUNT)}


@pytest.mark.parametrize(
    ("shape", "fits", "others"),
    [
        (COUNT, [0, 1, 10**20], [-1, True, 0.0, "1", None]),
        (NUMBER, [0, -1, 0.5, math.inf], [True, "1", None]),
        (TIME, [0, 0.5, 99_999_999_999], [-0.1, 1e11, True, None]),
        (TEXT, ["", "a\nb", "x" * 4096], ["x" * 4097, 1, None]),
        (DIGEST, ["0a" * 32], ["0A" * 32, "0a" * 31, "0a" * 33, "0a" * 32 + "\n", 1]),
        (re.compile("a|b"), ["a"], ["ab", ""]),
        (bool, [True], [1, None]),
        (int, [1], [True, 1.0]),
        (dict, [{}, {"a": 1}], [[], None]),
        (None, [None], [0, "", False]),
        (ANY, [None, 0, {}], []),
        ((None, {"a": COUNT}), [None, {"a": 1}], [{}, {"a": -1}, 1]),
        ([COUNT], [[], [0, 1]], [[0, -1], {}, "", None]),
        (Values(COUNT), [{}, {"a": 0}], [{"a": -1}, [], None]),
        ({"a": COUNT}, [{"a": 0}], [{}, {"a": 0, "b": 0}, [], None]),
        ({"a": Optional(COUNT)}, [{}, {"a": 0}], [{"a": None}, {"b": 0}]),
        ({"a": COUNT, ANY: ANY}, [{"a": 0}, {"a": 0, "b": None}], [{"b": 0}, {"a": -1}]),
    ],
)
def test_what_a_shape_takes_and_what_it_does_not(shape: Any, fits: list[Any], others: list[Any]) -> None:
    for value in fits:
        require_shape(value, shape, "here")
    for value in others:
        with pytest.raises(ArtifactError):
            require_shape(value, shape, "here")


@pytest.mark.parametrize(
    ("record", "named", "found"),
    [
        ([], "the whole of it", "[]"),
        ({"steps": [], "made": {}}, "name", "'nothing'"),
        ({"name": "r", "steps": [{"key": "a"}, {"key": 1}], "made": {}}, "steps[1].key", "1"),
        ({"name": "r", "steps": [{"key": "a", "seconds": True}], "made": {}}, "steps[0].seconds", "True"),
        ({"name": "r", "steps": [], "made": {"b": 1, "a": -2}}, "made.a", "-2"),
        ({"name": "r", "steps": [], "made": {}, "more": 1}, "more", "'an unknown field'"),
    ],
)
def test_the_field_that_is_wrong_is_named(record: Any, named: str, found: str) -> None:
    with pytest.raises(ArtifactError) as caught:
        require_shape(record, RUN, "there", hints=("look",))
    assert caught.value.what == f"a record is malformed: {named}" and caught.value.found == found
    assert (caught.value.where, caught.value.hints) == ("there", ("look",))


def test_a_field_of_one_of_several_shapes_is_told_by_the_first() -> None:
    with pytest.raises(ArtifactError) as caught:
        require_shape({"a": {"b": -1}}, {"a": ({"b": COUNT}, None)}, "here")
    assert caught.value.what.endswith(": a.b")
    assert caught.value.hints == ("steps artifacts verify",)


def test_a_long_value_is_shown_in_short() -> None:
    for length, shown in ((118, 120), (119, 120)):
        with pytest.raises(ArtifactError) as caught:
            require_shape("x" * length, COUNT, "here")
        assert len(str(caught.value.found)) == shown
        assert str(caught.value.found).endswith("...") == (length == 119)
