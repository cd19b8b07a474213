"""What of a file a solution looks at before it changes a line."""

import pytest

from nemotron_steps.steps.data_prep.swe.demonstrations import _unique


@pytest.mark.parametrize(
    ("lines", "number", "old", "new"),
    [
        (["if a:", "    y = 2"], 2, "y = 2", "y = 9"),  # without its indentation
        (["y = 2", "z = 3", "y = 2"], 3, "z = 3\ny = 2", "z = 3\ny = 9"),
        (["y = 2", "y = 22"], 1, "y = 2\ny = 22", "y = 9\ny = 22"),  # nothing before it tells it from the other
        (["a", "y = 2", "a", "y = 2"], 4, "y = 2\na\ny = 2", "y = 2\na\ny = 9"),
    ],
)
def test_the_least_text_that_occurs_once_is_replaced(lines: list[str], number: int, old: str, new: str) -> None:
    right = lines[number - 1].replace("2", "9")
    assert _unique(lines, number, right) == (old, new)
    source = "\n".join(lines)
    assert source.count(old) == 1 and source.replace(old, new).split("\n")[number - 1] == right
