"""A home on a file system of fsspec's: what it holds, in which order it is written, and what its errors mean."""

import uuid
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.artifacts.backend import FsspecBackend
from nemotron_steps.artifacts.models import FileRecord
from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.errors import ArtifactError, StorageError, StorageUnreachableError


class Refused(OSError):
    """botocore's, which keep what the server said."""

    def __init__(self, status: int, code: str = "") -> None:
        super().__init__(f"status {status}")
        self.response = {"ResponseMetadata": {"HTTPStatusCode": status}, "Error": {"Code": code}}


@pytest.fixture
def backend(tmp_path: Path) -> FsspecBackend:
    return FsspecBackend(f"memory://{uuid.uuid4().hex}/home", tmp_path / "cache")


def staged(folder: Path, **texts: str) -> Path:
    for name, text in {"artifact.json": "{}", **texts}.items():
        file = folder / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


def heard(backend: FsspecBackend, monkeypatch: pytest.MonkeyPatch, *methods: str, at: int = 0) -> list[str]:
    """The paths below the home that are given to methods of the file system."""
    asked: list[str] = []

    def hearing(method: Any, position: int) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            asked.append(arguments[position].removeprefix(f"{backend._root}/"))
            return method(*arguments, **options)

        return call

    for name in methods:
        position = 1 if name == "put_file" else at
        monkeypatch.setattr(backend._fs, name, hearing(getattr(backend._fs, name), position))
    return asked


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (429, StorageUnreachableError),
        (500, StorageUnreachableError),
        (499, StorageError),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_server_that_is_busy_may_answer_later_and_one_that_refuses_will_not(
    status: int, kind: type[StorageError], wrapped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = FsspecBackend("memory://home", tmp_path)

    def refuse(path: str) -> Any:
        if wrapped:
            raise OSError("s3fs's own") from Refused(status)
        raise Refused(status)

    monkeypatch.setattr(backend._fs, "cat_file", refuse)
    with pytest.raises(StorageError) as caught:
        backend.read("artifacts/x")
    assert type(caught.value) is kind and caught.value.where == "memory://home/artifacts/x"


@pytest.mark.parametrize(
    "name",
    ["TimeoutError", "IncompleteReadError", "ClientPayloadError", "HTTPClientError", "ConnectionClosedError"],
)
def test_an_answer_that_did_not_come_to_its_end_may_come_later(
    name: str, backend: FsspecBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_off(path: str) -> Any:
        raise type("Deeper", (type(name, (Exception,), {}),), {})()

    monkeypatch.setattr(backend._fs, "cat_file", break_off)
    with pytest.raises(StorageUnreachableError):
        backend.read("x")


def test_what_makes_a_folder_count_is_written_last_and_deleted_first(
    backend: FsspecBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"train.jsonl": "1", "zebra": "2", "deep__artifact.json": "3"}
    written = heard(backend, monkeypatch, "put_file", "pipe_file")
    backend.commit_tree(staged(tmp_path / "one", **files), "objects/x")
    paths = ["objects/x/deep/artifact.json", "objects/x/train.jsonl", "objects/x/zebra", "objects/x/artifact.json"]
    assert written == paths
    backend.commit_tree(staged(tmp_path / "two", **files), "objects/x")
    assert written == paths, "what is there stays"
    deleted = heard(backend, monkeypatch, "rm_file")
    backend.commit_tree(staged(tmp_path / "three", other="4"), "objects/x", replace=True)
    assert deleted[0] == "objects/x/artifact.json" and sorted(deleted) == sorted(paths)
    assert [record.path for record in backend.stored_files("objects/x")] == ["other"]
    assert (backend.local("objects/x") / "other").read_text() == "4"


def test_a_copy_is_fetched_whole_or_not_at_all(
    backend: FsspecBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend.commit_tree(staged(tmp_path / "one", train="1", deep__more="2"), "objects/x")
    files = [FileRecord(path, 1, "") for path in ("train", "deep/more")]
    backend.drop_copy("objects/x")
    local = backend.local_tree("objects/x", files)
    assert sorted(path.name for path in local.rglob("*")) == ["artifact.json", "deep", "more", "train"]
    fetched = heard(backend, monkeypatch, "get_file")
    assert backend.local_tree("objects/x", files) == local and fetched == []
    backend.drop_copy("objects/x")
    with pytest.raises(ArtifactError, match="missing from the store") as caught:
        backend.local_tree("objects/x", [*files, FileRecord("gone", 1, "")])
    assert str(caught.value.where).endswith("/home/objects/x/gone")
    assert list(local.parent.iterdir()) == []


def test_a_copy_with_other_bytes_of_the_same_size_and_time_is_fetched_again(
    backend: FsspecBackend, tmp_path: Path
) -> None:
    store = ArtifactStore(backend)
    artifact = store.add(staged(tmp_path / "mine", train="1"), type_name="export", name="a")
    (artifact.path / "train").chmod(0o644)
    (artifact.path / "train").write_text("2")
    assert (store.open("a").path / "train").read_text() == "1"
    backend.write(f"artifacts/objects/{artifact.digest}/train", b"2")
    backend.drop_copy(f"artifacts/objects/{artifact.digest}")
    for _ in range(2):
        with pytest.raises(ArtifactError, match="corrupt"):
            store.open("a")
    assert [str(problem.where) for problem in store.verify("a")] == [
        f"{backend.url}/artifacts/objects/{artifact.digest}/train"
    ]
