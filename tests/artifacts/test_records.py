"""Records by themselves: what is written is read back, and nothing else is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemotron_steps.artifacts.models import Artifact, Edge, FileRecord, Producer, tree_digest
from nemotron_steps.artifacts.records import artifact_bytes, parse_artifact
from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.errors import ArtifactError

FILES = (FileRecord("deep/train.jsonl", 3, "a" * 64),)
ARTIFACT = Artifact(
    type="training_jsonl",
    digest=tree_digest("training_jsonl", FILES),
    path=Path(),
    attributes={"rows": {"train": 2}, "loss": 0.25, "note": "größer"},
    files=FILES,
    name="toy/rows",
    version=3,
    producer=Producer("toy/make", "rows", "run-1", "1.0", "key"),
    inputs=(Edge("rows", "b" * 64, "x:v1"),),
    created=1.5,
)


def test_a_record_is_read_back_as_it_was() -> None:
    assert parse_artifact(artifact_bytes(ARTIFACT), "here") == ARTIFACT


def test_a_record_without_a_checksum_is_read_if_it_is_of_the_format_that_had_none() -> None:
    record = json.loads(artifact_bytes(ARTIFACT))
    del record["checksum"]
    with pytest.raises(ArtifactError, match="changed after it was written"):
        parse_artifact(json.dumps(record).encode(), "here")
    assert parse_artifact(json.dumps({**record, "format": 1}).encode(), "here") == ARTIFACT
    # The older format still has the digest over type and files.
    record["files"][0]["sha256"] = "c" * 64
    with pytest.raises(ArtifactError, match="contradicts itself"):
        parse_artifact(json.dumps({**record, "format": 1}).encode(), "here")


@pytest.mark.parametrize("version", [1, 3, 0, "1", None])
def test_a_record_of_another_format_is_told_by_it(version: object) -> None:
    record = {**json.loads(artifact_bytes(ARTIFACT)), "format": version}
    with pytest.raises(ArtifactError, match="another version") as caught:
        parse_artifact(json.dumps(record).encode(), "here")
    assert caught.value.found == f"format {version}"


def test_a_commit_is_not_lost_over_a_broken_record_of_an_earlier_one(store: ArtifactStore, tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('{"v": 1}\n')
    store.add(path, name="a")
    (tmp_path / "home/artifacts/names/a/v1.json").write_bytes(b"\x00garbage")
    assert store.add(path, name="a").ref == "a:v2"
    (tmp_path / "home/artifacts/names/a/v1.json").unlink()
    path.write_text('{"v": 2}\n')
    assert store.add(path, name="a").ref == "a:v3", "numbers go on from the newest, whichever are gone"
    (tmp_path / "home/artifacts/names/a/v3.json").unlink()
    (tmp_path / "home/artifacts/names/a/v1.json").write_bytes(b"\x00garbage")
    (first, broken), (second, whole) = store.records("a")
    assert (first, second) == ("a:v1", "a:v2") and isinstance(broken, ArtifactError)
    assert isinstance(whole, Artifact) and whole.ref == "a:v2"
    assert [artifact.ref for artifact in store.list_artifacts()] == ["a:v2"]


def test_a_file_added_to_a_committed_folder_is_not_read_with_it(store: ArtifactStore, tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('{"v": 1}\n')
    artifact = store.add(path, name="a")
    (artifact.path / "validation.jsonl").write_text('{"v": 2}\n')
    with pytest.raises(ArtifactError) as caught:
        store.open("a")
    assert caught.value.where == str(artifact.path / "validation.jsonl")
    assert store.add(path, name="a").ref == "a:v1", "the same content, committed again, repairs it"
    assert store.open("a").jsonl("validation") is None and store.verify("a") == []
