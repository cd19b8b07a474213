"""What of a file a solution looks at before it changes a line."""

from __future__ import annotations

import pytest

from nemotron_steps.steps.data_prep.swe.mutations import Mutation
from nemotron_steps.steps.data_prep.swe.trajectories import AROUND, SHORT, solving_steps


def fault(lines: int, line: int) -> Mutation:
    source = [f"x{number} = {number}" for number in range(1, lines + 1)]
    correct, source[line - 1] = source[line - 1], f"x{line} = -{line}"
    return Mutation("constant", "a.py", line, correct, source[line - 1], "\n".join(source))


@pytest.mark.parametrize(
    ("lines", "line", "seen"),
    [
        (SHORT, 50, None),
        (SHORT + 1, 50, [50 - AROUND, 50 + AROUND]),
        (SHORT + 1, 3, [1, 3 + AROUND]),
        (SHORT + 1, SHORT, [SHORT - AROUND, SHORT + 1]),
    ],
)
def test_a_long_file_is_looked_at_around_the_fault_and_within_its_lines(
    lines: int, line: int, seen: list[int] | None
) -> None:
    (_, view, text), (_, edit, _) = solving_steps(fault(lines, line))
    assert view == {"path": "a.py"} | ({} if seen is None else {"view_range": seen})
    first, last = seen or (1, lines)
    assert f"x{first} = " in text and f"x{last} = " in text and f"x{last + 1} = " not in text
    assert (edit["old_str"], edit["new_str"]) == (f"x{line} = -{line}", f"x{line} = {line}")
