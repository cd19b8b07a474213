"""What data that is no artifact is taken for."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.session.supplied_data import _look, unknown_rows

ROW = {"responses_create_params": {"input": "1 + 1?"}, "agent_ref": {"name": "math_with_judge_simple_agent"}}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (json.dumps(ROW), "JSON Lines in a file whose name does not end in .jsonl"),
        (json.dumps({**ROW, "long": "x" * 300}), "JSON Lines in a file whose name does not end in .jsonl"),
        (json.dumps(ROW, indent=2), "a file of another kind (.json)"),
        ('{"a": "' + "x" * 120 + '\n"}', "a file of another kind (.json)"),
        (" \n\t\n", "an empty file"),
        ("  [1]", "a table"),
        ("PAR1", "a table"),
    ],
    ids=[
        "a row",
        "a row too long to be read whole",
        "an object over several lines",
        "a line cut in two",
        "blank lines",
        "a list",
        "a table by its first bytes",
    ],
)
def test_lines_that_begin_like_objects_are_rows_where_they_end_like_them(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text + "\n")
    assert _look(tmp_path / "x.json")[0] == said


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


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ([], "an empty folder"),
        (["a.jsonl", "deep/b.jsonl"], "a folder of empty files"),
        (["a.jsonl", "b.txt"], "a folder of a.jsonl, b.txt"),
        (["dataset_info.json"], "a folder of dataset_info.json"),
        (["dataset_info.json", "x.arrow"], "a folder of tables"),
        (["README.md", "deep/x.parquet"], "a folder of tables"),
        (["a", "b", "c", "d", "e"], "a folder of a, b, c, d, e"),
        (["a", "b", "c", "d", "e", "f", "g"], "a folder of a, b, c, d, e and 2 more"),
    ],
)
def test_a_folder_is_told_by_its_files(names: list[str], said: str, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert _look(tmp_path)[0] == said


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
