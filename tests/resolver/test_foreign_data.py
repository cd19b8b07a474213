"""What is offered for data that is no artifact."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.session.supplied_data import _look, unknown_rows


def test_a_compressed_file_is_unpacked_by_the_command(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n')
    subprocess.run(["gzip", "rows.jsonl"], cwd=tmp_path, check=True)
    convert = _look(tmp_path / "rows.jsonl.gz")[1]
    subprocess.run(["bash", "-c", str(convert)], cwd=tmp_path, check=True)
    assert (tmp_path / "rows.jsonl").read_text() == '{"a": 1}\n'


@pytest.mark.parametrize(
    ("row", "columns", "fields"),
    [
        (
            {"label": 2, "text": "1 + 1?", "more": ["x"], "third": "z"},
            ["text", "more"],
            "fields label, more, text, third",
        ),
        ({"empty": "", "none": [], "my text": "x", "-a": "x"}, [], "fields -a, empty, my text, none"),
        ({}, [], "fields none"),
    ],
)
def test_columns_that_may_be_prompts_are_offered(row: dict[str, Any], columns: list[str], fields: str) -> None:
    found = unknown_rows("my rows.jsonl", "rl_prompts", row)
    assert found.found == fields
    if columns:
        assert [hint.partition("prompt_column=")[2].split()[0] for hint in found.hints] == columns
        assert "--input dataset='my rows.jsonl' " in found.hints[0]
    else:
        assert found.hints == ("steps types   # what rl_prompts is",)
