"""Preparations over plain folders, with parts small enough that a few rows are many of them."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemotron_steps.config.schema.data_prep import DataPrepConfig, SplitRows
from nemotron_steps.errors import DataError
from nemotron_steps.runs.context import OutputSlot, Tracker
from nemotron_steps.steps.data_prep.blends import formats
from nemotron_steps.steps.data_prep.blends.prepare import Source, prepare
from nemotron_steps.steps.data_prep.blends.shards import RowFunction, RowWork
from nemotron_steps.steps.data_prep.blends.sources import data_files
from tests.s3_server import s3_endpoint, s3_url

__all__ = ["s3_endpoint", "s3_url"]

FILES = {"train": "train.jsonl", "validation": "validation.jsonl", "heldout": "heldout.jsonl"}


@dataclass(frozen=True)
class Marked:
    """Refuses rows with `bad`, doubles rows with `twice`, leaves the others as they are."""

    def __call__(self) -> RowFunction:
        def become(where: str, row: dict[str, Any]) -> list[dict[str, Any]] | None:
            if "bad" in row:
                raise DataError(f"bad because of {row['bad']}", where=f"{where} field bad", found=str(row["bad"]))
            return [{**row, "copy": 0}, {**row, "copy": 1}] if row.get("twice") else None

        return become


@dataclass
class Prepared:
    """What a preparation wrote."""

    folder: Path
    counts: dict[str, int]
    records: list[dict[str, Any]]
    licence: str | None

    @property
    def accounting(self) -> dict[str, Any]:
        return json.loads((self.folder / "accounting.json").read_text())

    @property
    def refusals(self) -> list[dict[str, Any]]:
        path = self.folder / "refusals.ndjson"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def lines(self, split: str = "train") -> list[bytes]:
        path = self.folder / FILES[split]
        return path.read_bytes().splitlines(keepends=True) if path.exists() else []

    def rows(self, split: str = "train") -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines(split)]


Run = Callable[..., Prepared]


def run_prepare(
    folder: Path,
    paths: Sequence[Path | Source],
    *,
    work: RowWork | None = None,
    rows: SplitRows | None = None,
    sample: int | None = None,
    max_refused_share: float = 0.0,
    num_workers: int = 1,
    name: str = "out",
) -> Prepared:
    out = folder / name
    out.mkdir(exist_ok=True)
    records: list[dict[str, Any]] = []
    config = DataPrepConfig(
        input_path="the sources are given",
        rows=rows or SplitRows(validation=0),
        sample=sample,
        max_refused_share=max_refused_share,
        num_workers=num_workers,
    )
    slot, tracker = OutputSlot("training_jsonl", out), Tracker("prep", None, records.append)
    context: Any = SimpleNamespace(config=config, work=folder, tracker=tracker, outputs={"rows": slot})
    sources = [p if isinstance(p, Source) else Source(p.stem, data_files(str(p), key="jsonl.path")) for p in paths]
    counts = prepare(context, sources, work or Marked(), out)
    return Prepared(out, counts, records, slot.attributes.get("license"))


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of 40 bytes: fewer than one row, or a few."""
    monkeypatch.setattr(formats, "PART_BYTES", 40)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def prepared(*paths: Path | Source, **settings: Any) -> Prepared:
        return run_prepare(tmp_path, paths, **settings)

    return prepared


def write_lines(path: Path, rows: Sequence[dict[str, Any] | bytes]) -> Path:
    """JSON Lines; bytes are lines as they are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join((r if isinstance(r, bytes) else json.dumps(r).encode()) + b"\n" for r in rows))
    return path
