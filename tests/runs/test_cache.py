"""What counts as done: a record under the step's key whose artifacts are those that were made under it."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.artifacts.records import sealed
from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.runs.cache import recall, verify_entries
from tests.runs.runner_toy_plan import run


def entries(store: ArtifactStore) -> list[Path]:
    return sorted((store.backend.scratch / "artifacts/steps").iterdir())


def entry_of(store: ArtifactStore, port: str) -> Path:
    return next(path for path in entries(store) if port in json.loads(path.read_bytes())["outputs"])


def rewrite(path: Path, **changes: Any) -> None:
    record = {key: value for key, value in json.loads(path.read_bytes()).items() if key != "checksum"}
    path.write_bytes(sealed(record | changes))


def test_what_is_recorded_is_recalled(store: ArtifactStore) -> None:
    result = run(store)
    for path in entries(store):
        entry = recall(store, path.stem)
        assert entry is not None and entry.run == result.id
    assert list(verify_entries(store)) == []
    assert recall(store, "0" * 32) is None


@pytest.mark.parametrize("change", ["another digest", "another port's artifact", "another step's artifact"])
def test_a_record_that_names_another_artifact_is_not_used(
    store: ArtifactStore, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    run(store)
    path = entry_of(store, "model")
    outputs = json.loads(path.read_bytes())["outputs"]
    if change == "another digest":
        outputs["model"]["digest"] = outputs["report"]["digest"]
    elif change == "another port's artifact":
        outputs["model"] = outputs["report"]
    else:
        outputs["model"] = json.loads(entry_of(store, "rows").read_bytes())["outputs"]["rows"]
    rewrite(path, outputs=outputs)
    with caplog.at_level(logging.WARNING):
        assert recall(store, path.stem) is None
    assert "is not used" in caplog.text
    assert [found.ref for found in verify_entries(store)] == [f"artifacts/steps/{path.name}"]
    again = run(store)
    assert [step.state for step in again.steps] == ["cached", "ran"]
    assert list(verify_entries(store)) == []


def test_records_that_changed_places_are_not_used(store: ArtifactStore) -> None:
    run(store)
    first, second = entries(store)
    kept = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(kept)
    assert [recall(store, path.stem) for path in (first, second)] == [None, None]
    assert len(list(verify_entries(store))) == 2


def test_an_artifact_that_is_gone_is_made_again(store: ArtifactStore) -> None:
    run(store)
    digest = json.loads(entry_of(store, "model").read_bytes())["outputs"]["model"]["digest"]
    (store.backend.scratch / f"artifacts/objects/{digest}/artifact.json").unlink()
    assert recall(store, entry_of(store, "model").stem) is None
    assert list(verify_entries(store)) == []  # gone is not corrupt


def test_a_file_that_is_no_record_is_found_among_the_records(store: ArtifactStore) -> None:
    run(store)
    folder = entries(store)[0].parent
    for name in ("notes.txt", "short.json"):
        (folder / name).write_bytes(entries(store)[0].read_bytes())
    assert sorted(found.ref for found in verify_entries(store)) == [
        "artifacts/steps/notes.txt",
        "artifacts/steps/short.json",
    ]
