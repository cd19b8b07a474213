"""What data that is no artifact is taken for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemotron_steps.resolver.foreign_data import _look

ROW = {"responses_create_params": {"input": "1 + 1?"}, "agent_ref": {"name": "math_with_judge_simple_agent"}}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (json.dumps(ROW), "JSON Lines in a file whose name does not end in .jsonl"),
        (json.dumps({**ROW, "long": "x" * 300}), "JSON Lines in a file whose name does not end in .jsonl"),
        (json.dumps(ROW, indent=2), "a file of another kind (.json)"),
    ],
    ids=["a row", "a row too long to be read whole", "an object over several lines"],
)
def test_lines_that_begin_like_objects_are_rows_where_they_end_like_them(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text + "\n")
    assert _look(tmp_path / "x.json")[0] == said
