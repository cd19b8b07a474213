"""The store on a real S3 endpoint: moto's server on loopback, through s3fs."""

import json
import threading
from pathlib import Path

import pytest

from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.errors import ArtifactError, StorageError, UnknownNameError

pytest.importorskip("s3fs")
pytest.importorskip("moto")


def open_store(url: str, cache: Path) -> ArtifactStore:
    from nemotron_steps.artifacts.backend import FsspecBackend

    return ArtifactStore(FsspecBackend(url, cache))


def rows(path: Path, value: int) -> Path:
    path.write_text(json.dumps({"v": value}) + "\n")
    return path


def test_artifact_written_here_is_read_there(s3_url: str, tmp_path: Path) -> None:
    here, there = open_store(s3_url, tmp_path / "here"), open_store(s3_url, tmp_path / "there")
    written = here.add(rows(tmp_path / "train.jsonl", 1), name="deep/data")
    read = there.open("deep/data")
    assert (read.ref, read.digest) == (written.ref, written.digest) == ("deep/data:v1", written.digest)
    assert read.path != written.path and read.path.is_relative_to(tmp_path / "there")
    assert read.require_jsonl().read_text() == '{"v": 1}\n'
    assert here.add(rows(tmp_path / "train.jsonl", 2), name="deep/data").ref == "deep/data:v2"
    assert [artifact.ref for artifact in there.list_artifacts()] == ["deep/data:v1", "deep/data:v2"]
    assert there.verify("deep/data:v2") == []


def test_upload_without_its_commit_marker_does_not_exist(s3_url: str, tmp_path: Path) -> None:
    import s3fs

    store = open_store(s3_url, tmp_path / "cache")
    artifact = store.add(rows(tmp_path / "train.jsonl", 1), name="data")
    root = s3_url.removeprefix("s3://") + f"/artifacts/objects/{artifact.digest}"
    s3fs.S3FileSystem().rm(f"{root}/artifact.json")
    fresh = open_store(s3_url, tmp_path / "fresh")
    assert not fresh.exists(artifact.digest)
    with pytest.raises(ArtifactError, match="gone"):
        fresh.open("data")
    # The same content, produced again, finishes what was cut short.
    open_store(s3_url, tmp_path / "third").add(tmp_path / "train.jsonl", name="data")
    assert fresh.open("data").require_jsonl().read_text() == '{"v": 1}\n'


def test_versions_are_never_given_twice(s3_url: str, tmp_path: Path) -> None:
    def commit(number: int) -> None:
        store = open_store(s3_url, tmp_path / f"cache{number}")
        path = tmp_path / f"{number}.jsonl"
        refs.append(store.add(rows(path, number), name="raced").ref)

    refs: list[str] = []
    threads = [threading.Thread(target=commit, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(refs) == ["raced:v1", "raced:v2", "raced:v3", "raced:v4"]


def test_unreachable_store_is_a_storage_error(s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store("s3://no-such-bucket-here/home", tmp_path / "cache")
    with pytest.raises(StorageError, match="failed"):
        store.add(rows(tmp_path / "train.jsonl", 1), name="data")
    with pytest.raises(UnknownNameError):
        open_store(s3_url, tmp_path / "cache").find("nothing")
