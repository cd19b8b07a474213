"""Blend files: what they name, what their weights do, and what is said of a wrong one."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.config.schema.data_prep import DataPrepConfig, SplitRows
from nemotron_steps.errors import DataError
from nemotron_steps.runs.cache_key import text_of
from nemotron_steps.steps.data_prep.blends import blend_file
from nemotron_steps.steps.data_prep.blends.blend_file import read_blend
from nemotron_steps.steps.data_prep.blends.prepare import sources_of
from tests.steps.data_prep.blends.conftest import Prepared, Run, write_lines

GOLDEN = Path(__file__).parent / "golden"
"""A blend with lists for its splits, and the splits it gives."""


def blend(folder: Path, *data_sets: dict[str, Any]) -> Path:
    path = folder / "blend.json"
    path.write_text(json.dumps({"datasets": list(data_sets)}))
    return path


def prepared(run: Run, path: Path, **settings: Any) -> Prepared:
    return run(*sources_of(DataPrepConfig(blend_path=str(path))), **settings)


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A folder with 300 rows of a and 100 of b."""
    write_lines(tmp_path / "a.jsonl", [{"of": "a", "n": n} for n in range(300)])
    write_lines(tmp_path / "b.jsonl", [{"of": "b", "n": n} for n in range(100)])
    return tmp_path


def test_weights_take_a_share_of_the_rows_or_repeat_them_in_training(run: Run, two: Path):
    path = blend(
        two, {"name": "a", "path": "a.jsonl", "weight": 0.5}, {"name": "b", "path": "./b.jsonl", "weight": 2.5}
    )
    done = prepared(run, path, rows=SplitRows(validation=20, heldout=0))
    a = [row["n"] for row in done.rows() + done.rows("validation") if row["of"] == "a"]
    assert 120 < len(a) < 180 and len(set(a)) == len(a)
    assert done.accounting["left_out"] == 300 - len(a)
    repeats = Counter(row["n"] for row in done.rows() if row["of"] == "b")
    assert set(repeats.values()) == {2, 3} and 2.3 < sum(repeats.values()) / len(repeats) < 2.7
    held_out = {row["n"] for row in done.rows("validation") if row["of"] == "b"}
    assert held_out and not held_out & set(repeats)  # what is repeated in training is never held out
    assert prepared(run, path, rows=SplitRows(validation=20, heldout=0), name="again").lines() == done.lines()


@pytest.mark.parametrize(
    ("text", "where", "found"),
    [
        ("{oops", "", "Invalid JSON"),
        ('{"datasets": [{"name": "a", "path": "x", "wieght": 2}]}', " key datasets.0.wieght", "Extra inputs"),
        ('{"train": ["0.3", "data/prefix"]}', " key train.0", "should be an object"),
        ('{"datasets": [{"name": "a", "path": "x"}], "test": [{"name": "a", "path": "x"}]}', "", "datasets, test"),
    ],
)
def test_a_file_that_is_no_blend_names_the_key(tmp_path: Path, text: str, where: str, found: str):
    path = tmp_path / "blend.json"
    path.write_text(text)
    with pytest.raises(DataError, match="not a blend file") as caught:
        read_blend(str(path))
    assert caught.value.where == f"{path}{where}" and found in str(caught.value.found)


def test_two_data_sets_of_one_name_are_told_with_the_file_of_the_blend(tmp_path: Path):
    (tmp_path / "blend.json").write_text(
        json.dumps({"train": [{"name": "a", "path": "a.jsonl"}], "valid": [{"name": "b", "path": "b.jsonl"}] * 2})
    )
    with pytest.raises(DataError, match="have one name") as caught:
        read_blend(str(tmp_path / "blend.json"))
    assert caught.value.where == str(tmp_path / "blend.json")


def test_each_split_of_a_blend_is_mixed_and_weighted_by_itself(run: Run):
    done = prepared(run, GOLDEN / "blend.json", rows=SplitRows(validation=2, heldout=2))
    for split in ("train", "validation", "heldout"):
        assert done.lines(split) == (GOLDEN / "expected" / f"{split}.jsonl").read_bytes().splitlines(keepends=True)
    told = done.accounting
    assert told["splits"] == {split: len(done.lines(split)) for split in ("train", "validation", "heldout")}
    assert told["read"] + told["added"] == told["written"] + told["left_out"]
    assert list(told["sources"]) == [
        *("train/math", "train/code", "validation/math", "validation/code", "heldout/math")
    ]
    validation = Counter(row["of"] for row in done.rows("validation"))
    assert validation["math"] == 8 and validation["code"] == 10 - told["left_out"]


def test_a_split_that_the_blend_does_not_list_is_cut_from_training(run: Run, two: Path):
    path = two / "blend.json"
    lists = {"train": [{"name": "a", "path": "a.jsonl"}], "validation": [{"name": "b", "path": "b.jsonl"}]}
    path.write_text(json.dumps(lists))
    done = prepared(run, path, rows=SplitRows(train=200, validation=7, heldout=30))
    assert [row["n"] for row in done.rows()] == list(range(200))
    assert [row["of"] for row in done.rows("validation")] == ["b"] * 100
    assert [row["n"] for row in done.rows("heldout")] == list(range(270, 300))
    assert done.accounting["unused"] == 70


def of_config(values: dict[str, Any]) -> dict[str, str]:
    return {key: text_of(told) for key, told in blend_file.of_config(values).items()}


def test_the_fingerprint_of_a_config_follows_the_files_it_names(two: Path):
    path = blend(two, {"name": "a", "path": "a.jsonl"}, {"name": "hub", "path": "org/name"})
    values = {"blend_path": str(path), "input_path": None}
    before = of_config(values)
    assert of_config(values) == before
    write_lines(two / "a.jsonl", [{"n": 1}])
    changed = of_config(values)
    assert changed != before
    blend(two, {"name": "a", "path": "a.jsonl", "weight": 2})
    assert of_config(values) != changed
    assert of_config({"input_path": str(two / "b.jsonl")}) != of_config({"input_path": str(two / "a.jsonl")})


def test_a_path_that_could_be_the_hubs_is_the_folder_beside_the_blend_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "org/here").mkdir(parents=True)
    paths = ["org/here", "org/there", "rows.jsonl", "~/rows.jsonl", "/rows.jsonl", "s3://b/rows.jsonl"]
    entries = [{"name": str(n), "path": path} for n, path in enumerate(paths)]
    found = [entry.path for entry in read_blend(str(blend(tmp_path, *entries)))[None]]
    assert found == [f"{tmp_path}/org/here", "org/there", f"{tmp_path}/rows.jsonl", *paths[3:]]
