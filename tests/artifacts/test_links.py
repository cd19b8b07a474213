"""Symbolic links: those within a folder are files of it, all others are refused."""

import os
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.artifacts.files import confined, walk
from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.errors import ArtifactError
from tests.artifacts.checkpoint_files import write_hf


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "mine"
    made.mkdir()
    (made / "train.jsonl").write_text('{"v": 1}\n')
    (tmp_path / "secret.txt").write_text("canary")
    (tmp_path / "elsewhere").mkdir()
    return made


@pytest.mark.parametrize("target", ["../secret.txt", "/etc/hostname", "../elsewhere", "nowhere", "deep"])
@pytest.mark.parametrize("way", ["add", "reference", "commit"])
def test_a_link_out_of_the_folder_is_refused_by_name(store: ArtifactStore, folder: Path, target: str, way: str) -> None:
    (folder / "deep").mkdir()
    link = folder / "link.txt"
    link.symlink_to(target)
    with pytest.raises(ArtifactError, match="symbolic link") as caught:
        if way == "commit":
            store.commit(folder, "training_jsonl", name="a")
        else:
            getattr(store, way)(folder, name="a")
    assert caught.value.where == str(link)
    assert caught.value.found and os.path.basename(target) in caught.value.found
    assert store.list_artifacts() == []


@pytest.mark.parametrize("name", ["first.jsonl", ".first.jsonl", ".cache/first.jsonl"])
@pytest.mark.parametrize("type_name", [None, "training_jsonl"])
@pytest.mark.parametrize("way", ["add", "reference"])
def test_the_file_of_a_link_out_of_the_folder_is_never_read(
    store: ArtifactStore, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, type_name: str | None, way: str
) -> None:
    link = folder / name
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(folder.parent / "secret.txt")
    read: list[Path] = []
    there = Path.open

    def noted(path: Path, *args: Any, **more: Any) -> Any:
        read.append(path)
        return there(path, *args, **more)

    monkeypatch.setattr(Path, "open", noted)
    if name == "first.jsonl":
        with pytest.raises(ArtifactError, match="symbolic link leads out") as caught:
            getattr(store, way)(folder, type_name=type_name, name="a")
        assert "canary" not in str(caught.value)
    else:  # no part of the artifact
        artifact = getattr(store, way)(folder, type_name=type_name, name="a")
        assert [file.path for file in artifact.files] == ["train.jsonl"] and read
    assert link not in read


@pytest.mark.parametrize(("target", "stays"), [("other", True), ("../runs", False), ("../artifacts-old", False)])
def test_a_path_of_a_record_stays_in_its_first_folder_whatever_others_are_called(
    target: str, stays: bool, tmp_path: Path
) -> None:
    for name in ("artifacts/other", "artifacts-old", "runs"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "artifacts" / "link").symlink_to(target)
    if stays:
        assert confined(tmp_path, "artifacts/link/x") == tmp_path / "artifacts/link/x"
    else:
        with pytest.raises(ArtifactError, match="leads out"):
            confined(tmp_path, "artifacts/link/x")


def test_a_link_within_the_folder_is_a_file_of_the_artifact(store: ArtifactStore, folder: Path) -> None:
    (folder / "validation.jsonl").symlink_to("train.jsonl")
    for artifact in (store.add(folder, name="a"), store.open(store.reference(folder, name="b"))):
        assert [file.path for file in artifact.files] == ["train.jsonl", "validation.jsonl"]
        assert artifact.require_jsonl("validation").read_text() == '{"v": 1}\n'
    committed = store.commit(folder, "training_jsonl", name="c")
    assert not (committed.path / "validation.jsonl").is_symlink() and store.verify("c") == []


def test_a_snapshot_of_the_hub_cache_is_a_model_folder(store: ArtifactStore, tmp_path: Path) -> None:
    blobs = write_hf(tmp_path / "hub/models--org--name/blobs")
    snapshot = tmp_path / "hub/models--org--name/snapshots/0123abc"
    snapshot.mkdir(parents=True)
    for blob in blobs.iterdir():
        (snapshot / blob.name).symlink_to(Path("../../blobs") / blob.name)
    assert store.open(store.reference(snapshot, name="model")).type == "checkpoint_hf"
    assert store.add(snapshot, name="copy").digest == store.find("model").digest
    (snapshot / "stolen.txt").symlink_to("../../../../stolen.txt")
    (tmp_path / "stolen.txt").write_text("x")
    with pytest.raises(ArtifactError, match="leads out"):
        store.reference(snapshot, name="model")


def test_hidden_entries_are_left_out_at_the_top_alone_and_links_where_none_is_followed(folder: Path) -> None:
    for name in (".git/config", ".hidden", "deep/.kept", "deep/.also/x", "deep/y"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    (folder / "link").symlink_to("train.jsonl")

    def names(**options: Any) -> set[str]:
        return {path.relative_to(folder).as_posix() for path in walk(folder, **options)}

    below = {"train.jsonl", "deep/.kept", "deep/.also/x", "deep/y"}
    assert names(follow=None, skip_hidden=True) == below
    assert names(follow=folder, skip_hidden=True) == below | {"link"}
    assert names(follow=None) == below | {".git/config", ".hidden"}
