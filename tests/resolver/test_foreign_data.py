"""What data that is no artifact is taken for."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.session.supplied_data import _look, unknown_rows


@pytest.mark.parametrize(
    ("name", "said", "command"),
    [
        ("rows.jsonl.gz", "a compressed file (.gz)", "gzip -dc "),
        ("rows.jsonl.zst", "a compressed file (.zst)", "zstd -dc "),
        ("rows.jsonl.bz2", "a compressed file (.bz2)", "bzip2 -dc "),
        ("rows.jsonl.xz", "a compressed file (.xz)", "xz -dc "),
        ("rows", "a file of another kind (no suffix)", None),
    ],
)
def test_a_file_is_told_by_its_name(name: str, said: str, command: str | None, tmp_path: Path) -> None:
    path = tmp_path / "my data" / name
    path.parent.mkdir()
    path.write_text("x")
    found, convert = _look(path)
    assert found == said and (convert is None) == (command is None)
    if convert is not None and command is not None:
        assert command in convert and f"'{path}'" in convert and f"{name.split('.')[0]}.jsonl" in convert


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
