"""What `steps artifacts verify` tells of a home, and what it lets be."""

from pathlib import Path

import pytest

from nemotron_steps.artifacts.integrity import verify_home
from nemotron_steps.artifacts.store import ArtifactStore


def folder(path: Path, text: str = '{"v": 1}\n') -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "train.jsonl").write_text(text)
    return path


def told(store: ArtifactStore) -> dict[str, list[str]]:
    return {each.ref: [problem.what for problem in each.problems] for each in verify_home(store)}


def test_what_a_kill_left_beside_objects_is_let_be_and_anything_else_is_told(
    store: ArtifactStore, tmp_path: Path
) -> None:
    artifact = store.add(folder(tmp_path / "data"), name="a")
    objects, references = (tmp_path / "home/artifacts" / name for name in ("objects", "references"))
    references.mkdir()
    for name in (f"{artifact.digest}.0f.corrupt", f"{artifact.digest}.0f.partial", "stray", "0a" * 32):
        (objects / name).mkdir()
    for name in ("stray.json", "0a" * 32):
        (references / name).write_text("{}")
    stray = ["this is not part of any artifact"]
    assert told(store) == {
        "a:v1": [],
        "artifacts/objects/stray": stray,
        "artifacts/references/stray.json": stray,
        f"artifacts/references/{'0a' * 32}": stray,
    }


def test_an_object_that_no_name_leads_to_is_looked_at(store: ArtifactStore, tmp_path: Path) -> None:
    artifact = store.add(folder(tmp_path / "data"), name="a")
    (tmp_path / "home/artifacts/names/a/v1.json").unlink()
    assert told(store) == {}
    (artifact.path / "train.jsonl").unlink()
    (artifact.path / "link").symlink_to("/etc/hostname")
    (found,) = verify_home(store)
    assert (found.ref, found.digest) == (f"artifacts/objects/{artifact.digest}", artifact.digest)
    assert [problem.what for problem in found.problems] == ["a symbolic link leads out of the folder"]


def test_an_object_that_a_name_leads_to_is_told_once_and_one_that_is_gone_as_gone(
    store: ArtifactStore, tmp_path: Path
) -> None:
    artifact = store.add(folder(tmp_path / "data"), name="a")
    (artifact.path / "train.jsonl").unlink()
    assert list(told(store)) == ["a:v1"]
    (artifact.path / "artifact.json").unlink()
    assert told(store) == {"a:v1": ["the files of artifact 'a:v1' are gone"]}


def test_of_two_folders_with_one_content_the_one_that_changed_is_told(store: ArtifactStore, tmp_path: Path) -> None:
    for name in ("a", "b"):
        folder(tmp_path / name)
        (tmp_path / name / ".git").mkdir()
        (tmp_path / name / ".git" / "HEAD").write_text(name)
        store.reference(tmp_path / name, name=name)
    assert told(store) == {"a:v1": [], "b:v1": []}
    (tmp_path / "b" / "train.jsonl").write_text('{"v": 2}\n')
    (tmp_path / "b" / "more.jsonl").write_text('{"v": 2}\n')
    corrupt = "artifact 'b:v1' is corrupt: a file is not what was committed"
    assert told(store) == {"a:v1": [], "b:v1": [corrupt, corrupt]}


@pytest.mark.parametrize("which", ["version", "reference", "another"])
def test_an_object_with_another_record_in_place_of_its_own_is_told(
    which: str, store: ArtifactStore, tmp_path: Path
) -> None:
    artifact = store.add(folder(tmp_path / "data"), name="a")
    store.reference(tmp_path / "data", name="b")
    other = store.add(folder(tmp_path / "other", '{"v": 2}\n'), name="c")
    home = tmp_path / "home/artifacts"
    records = {
        "version": home / "names/a/v1.json",
        "reference": home / f"references/{artifact.digest}.json",
        "another": other.path / "artifact.json",
    }
    (artifact.path / "artifact.json").chmod(0o644)
    (artifact.path / "artifact.json").write_bytes(records[which].read_bytes())
    assert told(store)["a:v1"] == ["the record is another artifact's"]
    (artifact.path / "train.jsonl").unlink()
    assert len(told(store)["a:v1"]) == 2, "and what else is wrong"
