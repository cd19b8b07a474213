"""Files of a home: hashed, written whole or not at all, sealed; what keeps them from it is a storage error."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.artifacts.files import (
    as_storage_error,
    create_exclusive,
    hash_tree,
    tree_files,
    write_atomic,
)
from nemotron_steps.errors import StorageError


def refuse(code: int) -> Any:
    def raising(*arguments: object, **options: object) -> None:
        raise OSError(code, os.strerror(code))

    return raising


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_only_the_folders_own_manifest_is_no_file_of_it(tmp_path: Path) -> None:
    for name in ("artifact.json", "deep/artifact.json", ".hidden"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    for user_folder, found in ((False, [".hidden", "deep/artifact.json"]), (True, ["deep/artifact.json"])):
        listed = tree_files(tmp_path, user_folder=user_folder)
        assert [path.relative_to(tmp_path).as_posix() for path in listed] == found
        assert [record.path for record in hash_tree(tmp_path, user_folder=user_folder)] == found


@pytest.mark.parametrize("write", [write_atomic, create_exclusive])
@pytest.mark.parametrize("at", ["fsync", "mkdir"])
def test_what_cannot_be_written_is_a_storage_error_and_leaves_nothing(
    write: Any, at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "records" / "a.json"
    if at == "fsync":
        path.parent.mkdir()
        (path.parent / "b.json").write_bytes(b"other")
    with monkeypatch.context() as patch:
        patch.setattr(os, at, refuse(errno.EROFS))
        with pytest.raises(StorageError, match="the file system is read-only"):
            write(path, b"new")
    assert not path.parent.exists() if at == "mkdir" else names(path.parent) == ["b.json"]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (errno.ENOSPC, "the disk is full"),
        (errno.EFBIG, "file size limit"),
        (errno.EACCES, "permission was denied"),
        (errno.ENOENT, None),
    ],
)
def test_what_keeps_a_file_from_being_written_is_told_by_its_number(code: int, said: str | None) -> None:
    found = as_storage_error(OSError(code, "x", "/data/x"), "/")
    assert (found is None) == (said is None)
    if found is not None and said is not None:
        assert said in found.what and found.where == "/data/x" and str(found.found).endswith("inodes free")
