"""Records: the shape that each must have, and what is written is read back and nothing else."""

import json
from pathlib import Path

import pytest

from nemotron_steps.artifacts.models import Artifact, Edge, FileRecord, Producer, tree_digest
from nemotron_steps.artifacts.records import (
    artifact_bytes,
    parse_artifact,
    sealed,
)
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
    source="/data/rows",
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


def changed(**changes: object) -> bytes:
    """ARTIFACT's record, written by hand and sealed; its digest is that of its type and files unless it is given."""
    record = {"format": 2, **ARTIFACT.to_json(), **changes}
    if "digest" not in changes:
        files = [FileRecord(**file) for file in record["files"]]
        record["digest"] = tree_digest(record["type"], files)
    return sealed(record)


FILE = {"path": "a", "size": 1, "sha256": "a" * 64}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"digest": "0" * 64}, "contradicts itself"),
        ({"files": [FILE, {**FILE, "path": "b"}, FILE]}, "contradicts itself"),
        ({"name": "../a"}, "contradicts itself"),
        ({"location": "data/mine"}, "contradicts itself"),
        ({"files": [{**FILE, "path": "../a"}]}, "leaves its folder"),
        ({"version": -1}, "version"),
        ({"created": True}, "created"),
        ({"producer": {}}, "producer"),
        ({"more": 1}, "more"),
    ],
)
def test_a_record_that_says_what_cannot_be_is_refused_though_its_checksum_is_right(
    changes: dict[str, object], said: str
) -> None:
    with pytest.raises(ArtifactError, match=said) as caught:
        parse_artifact(changed(**changes), "here")
    assert caught.value.where == "here" and len(str(caught.value.found)) <= 200


def test_a_long_name_is_shown_in_short() -> None:
    for length, shown in ((198, 200), (199, 200)):
        with pytest.raises(ArtifactError) as caught:
            parse_artifact(changed(name="!" * length), "here")
        assert len(str(caught.value.found)) == shown
        assert str(caught.value.found).endswith("...") == (length == 199)


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b'"x"', b"\xff", b"[" * 100_000, b'{"a": NaN}', b'{"a": "\\ud83d"}']
)
def test_what_is_no_json_object_is_no_record(data: bytes) -> None:
    with pytest.raises(ArtifactError, match=r"is not (JSON|a JSON object)"):
        parse_artifact(data, "here")
