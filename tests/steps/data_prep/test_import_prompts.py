"""data_prep/import_prompts on real files of every kind, through the command line."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.cli.main import steps

ROWS = [{"question": f"{n} + {n}?", "answer": str(2 * n)} for n in range(5)]


def _jsonl(path: Path) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def _table(path: Path, delimiter: str) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["question", "answer"], delimiter=delimiter)
        writer.writeheader()
        writer.writerows(ROWS)
    return path


def _parquet(path: Path) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    return path


KINDS: dict[str, Callable[[Path], Path]] = {
    "rows.jsonl": _jsonl,
    "rows.csv": lambda path: _table(path, ","),
    "rows.parquet": _parquet,
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ArtifactStore:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STEPS_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return ArtifactStore(tmp_path / "home")


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_every_kind_of_file_are_imported(
    kind: str, home: ArtifactStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = KINDS[kind](tmp_path / kind)
    assert steps(["run", "data_prep/import_prompts", "--input", f"dataset={path}", "rows.heldout=1"]) == 0
    shown = capsys.readouterr().out
    assert "layout" in shown and "table" in shown and "question" in shown
    folder = home.open(home.find("data_prep/import_prompts/prompts")).path
    found: list[dict[str, Any]] = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    assert [(row["question"], row["answer"]) for row in found] == [(r["question"], r["answer"]) for r in ROWS[:4]]
    assert found[2]["responses_create_params"]["input"] == [{"role": "user", "content": "2 + 2?"}]
    assert len((folder / "heldout.jsonl").read_text().splitlines()) == 1


def test_of_a_folder_with_splits_the_training_rows_are_imported(
    home: ArtifactStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    datasets = pytest.importorskip("datasets")
    splits = {"train": datasets.Dataset.from_list(ROWS[:3]), "test": datasets.Dataset.from_list(ROWS[3:])}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    assert steps(["run", "data_prep/import_prompts", "--input", f"dataset={tmp_path / 'saved'}"]) == 0
    shown = capsys.readouterr().out
    assert "left aside" in shown and "test/data-00000" in shown
    folder = home.open(home.find("data_prep/import_prompts/prompts")).path
    found = [json.loads(line)["question"] for line in (folder / "train.jsonl").read_text().splitlines()]
    assert found == [row["question"] for row in ROWS[:3]]
