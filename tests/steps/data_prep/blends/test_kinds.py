"""What a file is, by its name or by how it begins."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from nemotron_steps.artifacts.models import MANIFEST_NAME
from nemotron_steps.steps.data_prep.blends.sources import data_files
from tests.steps.data_prep.blends.conftest import write_lines


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.ndjson", "a.jsonl.gz", "a.ndjson.gz", "a.json.gz", "a.parquet", "a.csv", "a.tsv"]
)
def test_a_data_file_of_a_folder_is_known_by_its_suffix(name: str, tmp_path: Path):
    (tmp_path / name).write_bytes(b"x")
    (tmp_path / "a.txt").write_bytes(b"x")
    (tmp_path / "dataset.jsonl.lock").write_bytes(b"x")
    (file,) = data_files(str(tmp_path), key="")
    kinds = {"jsonl": "jsonl", "ndjson": "jsonl", "gz": "gzip", "parquet": "parquet", "csv": "csv", "tsv": "csv"}
    assert (file.name, file.kind, file.size) == (name, kinds[name.rpartition(".")[2]], 1)


@pytest.mark.parametrize(
    ("name", "start", "kind"),
    [
        ("rows", b" \n[1]", "list"),
        ("rows.json", b"[", "list"),
        ("rows.jsonl", b"[", "jsonl"),
        ("rows.json", b"{", "jsonl"),
        ("rows.TSV", b"[", "csv"),
        ("rows.json", b"\x1f\x8b", "gzip"),
        ("rows", b"PAR1", "parquet"),
        ("rows", b"", "jsonl"),
    ],
)
def test_a_file_of_any_name_is_known_by_its_first_bytes(name: str, start: bytes, kind: str, tmp_path: Path):
    (tmp_path / name).write_bytes(start)
    assert [file.kind for file in data_files(str(tmp_path / name), key="")] == [kind]


def test_the_stores_own_record_beside_a_list_is_no_list(tmp_path: Path):
    for name in ("rows.json", MANIFEST_NAME):
        (tmp_path / name).write_text(json.dumps([{"n": 1}]))
    assert [file.name for file in data_files(str(tmp_path), key="")] == ["rows.json"]


def test_a_file_of_the_same_size_that_was_written_again_has_another_stamp(tmp_path: Path):
    path = write_lines(tmp_path / "a.jsonl", [{"n": 1}])
    (before,) = data_files(str(path), key="")
    os.utime(path, ns=(1, 1))
    assert data_files(str(path), key="")[0].stamp != before.stamp
