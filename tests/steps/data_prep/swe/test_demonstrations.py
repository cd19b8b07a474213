"""What of a file a solution looks at before it changes a line."""

from __future__ import annotations

import json

import pytest

from nemotron_steps.steps.data_prep.swe.demonstrations import AROUND, SHORT, _unique, solving_steps
from nemotron_steps.steps.data_prep.swe.mutations import Mutation
from nemotron_steps.steps.data_prep.swe_tasks import complete


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


@pytest.mark.parametrize(
    ("lines", "number", "old", "new"),
    [
        (["x = 1", "y = 2"], 2, "y = 2", "y = 9"),
        (["if a:", "    y = 2"], 2, "y = 2", "y = 9"),  # without its indentation
        (["y = 2", "z = 3", "y = 2"], 3, "z = 3\ny = 2", "z = 3\ny = 9"),
        (["a", "y = 2", "b", "y = 2"], 2, "a\ny = 2", "a\ny = 9"),
        (["y = 2", "y = 22"], 1, "y = 2\ny = 22", "y = 9\ny = 22"),  # nothing before it tells it from the other
        (["yy = 2", "y = 2"], 2, "yy = 2\ny = 2", "yy = 2\ny = 9"),
        (["a", "y = 2", "a", "y = 2"], 4, "y = 2\na\ny = 2", "y = 2\na\ny = 9"),
    ],
)
def test_the_least_text_that_occurs_once_is_replaced(lines: list[str], number: int, old: str, new: str) -> None:
    right = lines[number - 1].replace("2", "9")
    assert _unique(lines, number, right) == (old, new)
    source = "\n".join(lines)
    assert source.count(old) == 1 and source.replace(old, new).split("\n")[number - 1] == right


@pytest.mark.parametrize("as_text", [False, True])
def test_a_field_at_the_top_goes_before_the_instances_and_that_before_the_metadatas(as_text: bool) -> None:
    instance = {"repo": "instance", "patch": "instance"}
    metadata = {"repo": "metadata", "patch": "metadata", "base_commit": "metadata"}
    row = {
        "repo": "top",
        "instance_dict": json.dumps(instance) if as_text else instance,
        "responses_create_params": {"metadata": metadata, "input": "asked"},
    }
    done = complete(row, "f:1")
    assert (done["repo"], done["patch"], done["base_commit"]) == ("top", "instance", "metadata")
    assert done["responses_create_params"]["input"] == "asked" and done["agent_ref"]["name"] == "swe_agent"
