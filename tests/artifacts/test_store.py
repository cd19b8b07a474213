from __future__ import annotations

import json
import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from nemotron_steps.artifacts.lineage import lineage
from nemotron_steps.artifacts.models import Edge, Producer
from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.errors import DataError
from tests.artifacts.checkpoint_files import write_hf


def rows(path: Path, *values: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"v": value}) + "\n" for value in values))
    return path


def corrupt(path: Path) -> None:
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)


def test_added_file_becomes_a_versioned_read_only_artifact(store: ArtifactStore, tmp_path: Path) -> None:
    artifact = store.add(rows(tmp_path / "train.jsonl", 1, 2), name="data")
    assert artifact.ref == "data:v1" and artifact.type == "training_jsonl"
    assert artifact.attributes == {"rows": {"train": 2}}
    assert artifact.require_jsonl().read_text() == '{"v": 1}\n{"v": 2}\n'
    assert not os.stat(artifact.path / "train.jsonl").st_mode & 0o222
    assert json.loads((artifact.path / "artifact.json").read_text())["digest"] == artifact.digest


def test_committing_the_content_again_repairs_a_corrupt_object(store: ArtifactStore, tmp_path: Path) -> None:
    artifact = store.add(rows(tmp_path / "train.jsonl", 1, 2), name="data")
    corrupt(artifact.path / "train.jsonl")
    assert store.add(tmp_path / "train.jsonl", name="data").ref == "data:v1"
    assert store.verify("data") == []


def test_invalid_content_is_not_committed(store: ArtifactStore, tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('{"v": 1}\n{"v": 2')
    with pytest.raises(DataError) as caught:
        store.add(path, name="data")
    assert caught.value.where == f"{path}:2"
    assert store.list_artifacts() == [] and not (tmp_path / "home/artifacts/objects").exists()


def test_user_folder_is_used_in_place_and_noticed_when_it_changes(store: ArtifactStore, tmp_path: Path) -> None:
    folder = write_hf(tmp_path / "model")
    (folder / ".git").mkdir()
    (folder / ".git" / "HEAD").write_text("x")
    artifact = store.reference(folder)
    assert artifact.path == folder and artifact.ref == "input/model:v1"
    assert not any(record.path.startswith(".git") for record in artifact.files)
    assert store.reference(folder).ref == "input/model:v1"
    (folder / "generation_config.json").write_text("{}")
    assert store.reference(folder).ref == "input/model:v2"
    copy = store.add(folder, name="copy")
    assert copy.digest == store.find("input/model").digest
    assert store.open("copy").path != folder


def test_dead_staging_is_cleaned_and_live_staging_is_not(store: ArtifactStore, tmp_path: Path) -> None:
    dead = tmp_path / "home/artifacts/staging/dead"
    dead.mkdir(parents=True)
    (dead / "half").write_text("x")
    with store.staging() as mine:
        assert not dead.exists()
        with store.staging():
            assert mine.exists()
    assert not mine.exists()


def test_what_is_no_folder_of_staging_is_cleaned_away_and_what_a_link_leads_to_stays(
    store: ArtifactStore, tmp_path: Path
) -> None:
    staging, elsewhere = tmp_path / "home/artifacts/staging", tmp_path / "elsewhere"
    staging.mkdir(parents=True)
    elsewhere.mkdir()
    (elsewhere / "mine").write_text("x")
    (staging / "file").write_text("x")
    (staging / "link").symlink_to(elsewhere)
    (staging / "dangling").symlink_to(tmp_path / "nothing")
    with store.staging() as folder:
        assert [*staging.iterdir()] == [folder]
    assert (elsewhere / "mine").is_file()


@pytest.mark.parametrize("uid", [0, 1])
def test_of_a_users_folder_only_their_own_dead_copies_are_cleaned_away(
    uid: int, store: ArtifactStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead, *others = (tmp_path / f".out.export-{name}" for name in (f"{1:032x}", "notes", f"{2:032x}s", f"{3:032x}"))
    for folder in (dead, *others[:-1]):
        folder.mkdir()
    others[-1].write_text("x")
    (link := tmp_path / f".out.export-{4:032x}").symlink_to("nothing")
    mine = os.getuid()
    monkeypatch.setattr("os.getuid", lambda: mine + uid)
    with store.staging(tmp_path / "out") as folder:
        assert folder.parent == tmp_path
    assert all(path.exists() for path in others) and link.is_symlink() and dead.exists() == bool(uid)


def _commit_one(home: Path, number: int, barrier: multiprocessing.synchronize.Barrier) -> None:
    store = ArtifactStore(home)
    with store.staging() as folder:
        tree = folder / "tree"
        rows(tree / "train.jsonl", number // 2)
        barrier.wait()
        producer = Producer("step", "out", f"run{number}", cache_key=str(number))
        store.commit(tree, "training_jsonl", name="raced", producer=producer)


def test_racing_commits_lose_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(6)
    processes = [context.Process(target=_commit_one, args=(tmp_path / "home", n, barrier)) for n in range(6)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 6
    store = ArtifactStore(tmp_path / "home")
    artifacts = store.list_artifacts(name="raced")
    assert [artifact.version for artifact in artifacts] == [1, 2, 3, 4, 5, 6]
    assert len({artifact.digest for artifact in artifacts}) == 3
    assert all(store.verify(artifact) == [] for artifact in artifacts)


def test_lineage_keeps_productions_of_the_same_bytes_apart(store: ArtifactStore, tmp_path: Path) -> None:
    """A step that hands on what it was given does not make a model its own parent."""

    def commit(name: str, run: str, *parents: str) -> None:
        with store.staging() as folder:
            rows(folder / "tree" / "train.jsonl", 1)
            edges = [Edge("in", store.find(parent).digest, store.find(parent).ref) for parent in parents]
            producer = Producer(name, "out", run, cache_key=run)
            store.commit(folder / "tree", "training_jsonl", name=name, inputs=edges, producer=producer)

    commit("base", "r1")
    commit("tuned", "r2", "base")
    commit("other", "r3")
    commit("tuned", "r4", "other")
    assert len({artifact.digest for artifact in store.list_artifacts()}) == 1
    up = {ref: [link.parent for link in lineage(store, store.find(ref)).ancestors] for ref in ("tuned:v1", "tuned:v2")}
    assert up == {"tuned:v1": ["base:v1"], "tuned:v2": ["other:v1"]}
    assert lineage(store, store.find("base")).ancestors == ()
    below = lineage(store, store.find("base")).descendants
    assert [(link.child, link.step, link.run) for link in below] == [("tuned:v1", "tuned", "r2")]


def test_commit_killed_while_it_wrote_the_manifest_does_not_change_the_artifact(
    store: ArtifactStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = rows(tmp_path / "staged/train.jsonl", 1, 2).parent
    child = os.fork()
    if child == 0:
        monkeypatch.setattr(os, "fsync", lambda descriptor: os.kill(os.getpid(), signal.SIGKILL))
        store.commit(staged, "training_jsonl", name="data")
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert [path.name for path in staged.glob(".*")] != []
    artifact = store.commit(staged, "training_jsonl", name="data")
    assert artifact.digest == store.add(rows(tmp_path / "train.jsonl", 1, 2)).digest
    assert sorted(path.name for path in artifact.path.iterdir()) == ["artifact.json", "train.jsonl"]
