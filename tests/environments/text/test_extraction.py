import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemotron_steps.environments.text.extraction import (
    json_values,
    last_boxed,
    last_captures,
)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"\boxed{a} \fbox {b}", "b"),
        (r"\boxed{a} \boxed{b", "a"),
        (r"\boxed{a \boxed{b} c", "b"),
        (r"\boxed{ a \boxed{b} c }", "b"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{a\}b}", r"a\}b"),
        (r"\boxed{a\\}b}", "a\\\\"),
        (r"\boxed{x", None),
    ],
)
def test_the_last_complete_box(text: str, found: str | None) -> None:
    assert last_boxed(text) == found


def values(text: str, opener: Any) -> list[Any]:
    return [value for _, value in json_values(text, opener)]


def test_json_is_found_in_prose_wherever_it_stands() -> None:
    assert values('see [1], {x} and [note] {"a": [2]} {}', "[") == [[1], [2]]
    assert values('see {x} {"a": {"b": [2]}} { } {"c"', "{") == [{"a": {"b": [2]}}, {}]
    assert values('{"a": ' * 90 + '{"b": 1}', "{") == [{"b": 1}]


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_any_list_is_found_again(value: Any) -> None:
    assert values(f"The answer: {json.dumps([value])} .", "[") == [[value]]


@pytest.mark.parametrize(
    ("pattern", "text", "found"),
    [
        (r"a(\d)", "a1 a2", "2"),
        (r"a\d", "a1 a2 b", "a2"),
        (r"(x)?(y)? (\d)", "y 3", "y"),
        (r"( )(y)", " y", "y"),
        (r"(\s*)b ", "a  b ", "b"),
        (r"c", "ab", None),
    ],
)
def test_a_capture_is_the_first_group_with_text_of_the_last_match(pattern: str, text: str, found: str | None) -> None:
    assert last_captures(text, [pattern]) == [found]
    assert last_captures(text, ["zz", pattern, pattern]) == [None, found, found]
    assert last_captures(text.upper(), [pattern], re.IGNORECASE) == [found if found is None else found.upper()]
