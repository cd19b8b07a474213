"""Which production is the next version, which one a reference means, and what is read of it."""

import errno
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.artifacts import store as store_module
from nemotron_steps.artifacts.models import Artifact, Edge, Producer
from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.errors import ArtifactError, UnknownNameError


def rows(path: Path, *values: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"v": value}) + "\n" for value in values))
    return path


def commit(store: ArtifactStore, value: object = 1, type_name: str = "training_jsonl", **options: Any) -> Artifact:
    with store.staging() as folder:
        rows(folder / "tree" / "train.jsonl", value)
        return store.commit(folder / "tree", type_name, **{"name": "a", **options})


MADE = Producer("train", "model", "run-1", "1.0", "key")
FIRST, SECOND = Edge("rows", "1" * 64, "x:v1"), Edge("base", "2" * 64, "y:v1")
SAME = {"producer": MADE, "inputs": [FIRST, SECOND], "attributes": {"seed": 1}}


@pytest.mark.parametrize(
    ("changes", "version"),
    [
        ({}, 1),
        ({"producer": Producer("train", "model", "run-2", "1.0", "key")}, 1),
        ({"inputs": [Edge("rows", "1" * 64, "z:v1"), SECOND]}, 1),
        ({"producer": Producer("tune", "model", "run-1", "1.0", "key")}, 2),
        ({"producer": Producer("train", "model", "run-1", "1.0", "other")}, 2),
        ({"inputs": [FIRST, Edge("base", "3" * 64, "y:v1")]}, 2),
        ({"attributes": {"seed": 2}}, 2),
        ({"value": 2}, 2),
        ({"type_name": "export"}, 2),
    ],
)
def test_what_was_made_otherwise_is_another_version_and_what_was_made_again_is_not(
    changes: dict[str, Any], version: int, store: ArtifactStore
) -> None:
    first = commit(store, **SAME)
    again = commit(store, **{**SAME, **changes})
    assert (first.version, again.version, store.find("a").version) == (1, version, version)
    assert (first.digest == again.digest) == ("value" not in changes and "type_name" not in changes)


def test_the_eleventh_version_comes_after_the_tenth(store: ArtifactStore) -> None:
    before = time.time()
    for number in range(1, 12):
        assert commit(store, number).version == number
    assert store.find("a").ref == store.find("a:latest").ref == "a:v11" and store.versions("a") == [*range(1, 12)]
    assert [artifact.version for artifact in store.list_artifacts()] == [*range(1, 12)]
    assert before <= store.find("a:v1").created <= store.find("a").created <= time.time()
    with pytest.raises(UnknownNameError) as caught:
        store.find("a:12")
    assert caught.value.expected == "v4, v5, v6, v7, v8, v9, v10, v11"


def test_bit_rot_is_found_by_who_asks_for_every_byte(store: ArtifactStore) -> None:
    path = commit(store).path / "train.jsonl"
    status = path.stat()
    path.chmod(0o644)
    path.write_text('{"v": 2}\n')
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(ArtifactError, match="corrupt"):  # the time of its last change is looked at, too
        store.open("a")


def test_what_was_hashed_once_is_not_hashed_again(
    store: ArtifactStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.reference(rows(tmp_path / "data" / "train.jsonl", 2).parent, name="b")
    commit(store)
    hashed: list[Path] = []
    hash_file = store_module.sha256_file
    monkeypatch.setattr(store_module, "sha256_file", lambda path: (hashed.append(path), hash_file(path))[1])
    for name in ("a", "b", "a", "b"):
        store.open(name)
    assert hashed == []
    os.utime(tmp_path / "data" / "train.jsonl", ns=(0, 0))
    for _ in range(2):
        store.open("b")
    assert hashed == [tmp_path / "data" / "train.jsonl"]


@pytest.mark.parametrize("kept", ["", "{", "[]", "{}", '{"folder": 1, "files": {}}', '{"folder": "HERE", "files": 3}'])
def test_a_note_of_what_was_hashed_that_cannot_be_read_is_not_believed(
    kept: str, store: ArtifactStore, tmp_path: Path
) -> None:
    artifact = commit(store)
    note = tmp_path / f"home/artifacts/verified/{artifact.digest}.json"
    note.write_text(kept.replace("HERE", str(artifact.path)))
    assert store.open("a").path == artifact.path
    assert json.loads(note.read_text())["folder"] == str(artifact.path), "it is hashed, and noted anew"


def test_what_was_hashed_in_one_home_is_hashed_again_in_its_copy(store: ArtifactStore, tmp_path: Path) -> None:
    commit(store)
    shutil.copytree(tmp_path / "home", tmp_path / "moved")  # with the files' times, as rsync copies
    (copy,) = (tmp_path / "moved/artifacts/objects").glob("*/train.jsonl")
    status = copy.stat()
    copy.chmod(0o644)
    copy.write_text('{"v": 2}\n')
    os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(ArtifactError, match="corrupt"):
        ArtifactStore(tmp_path / "moved").open("a")


def test_a_home_that_cannot_be_written_is_read(
    store: ArtifactStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    commit(store)
    shutil.rmtree(tmp_path / "home/artifacts/verified")

    def read_only(*arguments: object, **options: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "mkdir", read_only)
    assert store.open("a").require_jsonl().read_text() == '{"v": 1}\n'
    assert "could not record" in caplog.text


def test_a_hidden_file_put_into_a_committed_folder_is_noticed(store: ArtifactStore, tmp_path: Path) -> None:
    (commit(store).path / ".hidden").write_text("x")
    with pytest.raises(ArtifactError, match="corrupt") as caught:
        store.open("a")
    assert str(caught.value.where).endswith("/.hidden")
    data = rows(tmp_path / "data" / "train.jsonl", 1).parent
    (data / ".git").mkdir()
    (data / ".git" / "HEAD").write_text("x")
    store.reference(data, name="b", type_name="export")
    assert store.open("b").path == data, "a user's own are no part of the artifact"


def test_a_folder_used_in_place_is_read_from_the_home_where_it_was_committed_too(
    store: ArtifactStore, tmp_path: Path
) -> None:
    data = rows(tmp_path / "data" / "train.jsonl", 1).parent
    store.reference(data, name="b")
    committed = store.add(data, name="a")
    shutil.rmtree(data)
    (committed.path / ".hidden").write_text("x")
    with pytest.raises(ArtifactError, match="corrupt"):
        store.open("b")
    (committed.path / ".hidden").unlink()
    assert store.open("b").path == committed.path and store.verify("b") == []
