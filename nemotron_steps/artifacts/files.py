"""Atomic local file work: hashing, atomic writes, durable renames, storage failures as StorageError; strict JSON."""

import errno
import hashlib
import json
import math
import os
import shlex
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nemotron_steps.artifacts.confinement import link_root, walk
from nemotron_steps.artifacts.models import MANIFEST_NAME, FileRecord
from nemotron_steps.errors import StorageError

_STORAGE_ERRNOS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file would exceed the file size limit",
    errno.EACCES: "permission was denied",
    errno.EPERM: "permission was denied",
    errno.EROFS: "the file system is read-only",
    errno.EIO: "the disk reported an input/output error",
}
_NOT_FINITE = ("nan", "inf", "-inf")


def sha256_file(path: Path) -> str:
    """sha256 of a file's content, in hex."""
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_tree(folder: Path, *, user_folder: bool = False) -> list[FileRecord]:
    """Size and sha256 of every file that `tree_files` finds; a single file stands for itself."""
    files = [folder] if folder.is_file() else tree_files(folder, user_folder=user_folder)
    root = folder.parent if folder.is_file() else folder
    return [FileRecord(path.relative_to(root).as_posix(), path.stat().st_size, sha256_file(path)) for path in files]


def tree_files(folder: Path, *, user_folder: bool = False) -> list[Path]:
    """The files an artifact folder consists of, sorted by relative posix path, without its own artifact.json.

    In a folder that a user supplies hidden entries at its top (`.git`, `.cache`) do not count. A symbolic link to a
    file of the folder counts as that file; ArtifactError for any other link, which would take files from elsewhere.
    """
    follow = link_root(folder) if user_folder else folder
    found = (path for path in walk(folder, follow=follow, skip_hidden=user_folder) if path != folder / MANIFEST_NAME)
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def replace_links(folder: Path) -> None:
    """Put the file in place of every symbolic link to one: a committed folder must not depend on how it was filled."""
    for path in tree_files(folder):
        if path.is_symlink():
            temporary = _temporary(path)
            shutil.copyfile(path, temporary)
            temporary.replace(path)


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file so that a reader sees the old content or the new, also after a power cut."""
    with _written_beside(path, data) as temporary:
        temporary.replace(path)


def create_exclusive(path: Path, data: bytes) -> bool:
    """Create a file with this content unless it exists; whether this call created it. Atomic against races."""
    with _written_beside(path, data) as temporary:
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
    return True


@contextmanager
def _written_beside(path: Path, data: bytes) -> Iterator[Path]:
    """A durable file of this content beside `path`, to be given its name; that is durable afterwards."""
    temporary = _temporary(path)
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(path.parent)


def remove_unfinished(path: Path) -> None:
    """Delete what writers of this file left beside it when they were killed; none may be at work."""
    for leftover in path.parent.glob(f".{path.name}.*.tmp"):
        leftover.unlink(missing_ok=True)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")


def sync_folder(folder: Path) -> None:
    """Make the entries of a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def seal_tree(folder: Path) -> None:
    """Make every file of a folder durable and read-only, so that a later writer cannot change it by accident."""
    with storage_errors(folder):
        for path in [*tree_files(folder), folder / MANIFEST_NAME]:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            path.chmod(path.stat().st_mode & ~0o222)
        for directory in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
            sync_folder(directory)


def remove_tree(folder: Path) -> None:
    """Delete a folder if it is there."""

    def ignore_missing(function: Any, path: str, info: Any) -> None:
        if not issubclass(info[0], FileNotFoundError):
            raise info[1]

    shutil.rmtree(folder, onerror=ignore_missing)


def set_aside(folder: Path) -> None:
    """Delete a folder, if it is there, so that no reader sees it with half of its files gone."""
    if folder.exists():
        aside = folder.with_name(f"{folder.name}.{uuid.uuid4().hex[:8]}.corrupt")
        folder.rename(aside)
        remove_tree(aside)


def copy_tree(source: Path, target: Path) -> None:
    """Copy a file (into the folder `target`) or the content of a folder; symbolic links become files."""
    target.mkdir(parents=True, exist_ok=True)
    with storage_errors(target):
        if source.is_file():
            shutil.copyfile(source, target / source.name)
            return
        for path in tree_files(source, user_folder=True):
            destination = target / path.relative_to(source)
            destination.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, destination)


def to_json_bytes(data: Mapping[str, Any]) -> bytes:
    """Readable JSON with a final newline."""
    return (json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


@contextmanager
def storage_errors(where: Path | str) -> Iterator[None]:
    """Turn an OSError that means "cannot write here" into a StorageError naming the place."""
    try:
        yield
    except OSError as error:
        translated = as_storage_error(error, where)
        if translated is None:
            raise
        raise translated from error


def as_storage_error(error: BaseException, where: Path | str) -> StorageError | None:
    """The StorageError an exception (or one that caused it) amounts to, or None. Libraries wrap a full disk in
    errors of their own without an errno, so their texts are looked at too."""
    visited: set[int] = set()
    seen: BaseException | None = error
    while seen is not None and id(seen) not in visited:
        visited.add(id(seen))
        if isinstance(seen, StorageError) and seen.hints:
            return seen
        code = seen.errno if isinstance(seen, OSError) else None
        if code is None and "No space left on device" in str(seen):
            code = errno.ENOSPC
        if code in _STORAGE_ERRNOS:
            what, place = _STORAGE_ERRNOS[code], str(getattr(seen, "filename", None) or where)
            there, disk = _disk(Path(where))
            found, looks = f"{disk.f_bavail * disk.f_frsize / 1e9:.2f} GB free", f"df -h {shlex.quote(str(there))}"
            if code == errno.ENOSPC and disk.f_files and not disk.f_favail:
                what, found = "the disk has no inodes left, one a file", f"0 of {disk.f_files:,} inodes free, {found}"
                looks = looks.replace("-h", "-i")
            return StorageError(
                f"writing failed: {what}",
                where=place,
                found=found,
                hints=(
                    "--home DIR   # on a larger disk",
                    f"{looks}   # make room and run the same command again: what was committed is kept",
                ),
            )
        seen = seen.__cause__ or seen.__context__
    return error if isinstance(error, StorageError) else None


def free_bytes(path: Path) -> int:
    """Bytes free for this user on the file system that holds `path` (or its nearest existing parent)."""
    _, disk = _disk(path)
    return disk.f_bavail * disk.f_frsize


def _disk(path: Path) -> tuple[Path, os.statvfs_result]:
    while not path.exists() and path != path.parent:
        path = path.parent
    return path, os.statvfs(path)


def as_float(value: Any) -> float | None:
    """A number of a record; also one that is not finite, which `plain` wrote as text. None for anything else."""
    known = value in _NOT_FINITE if isinstance(value, str) else isinstance(value, int | float)
    return float(value) if known and not isinstance(value, bool) else None


def plain(value: Any) -> Any:
    """`value` as strict JSON in UTF-8: NaN and infinities become strings, numpy and torch scalars become numbers.

    Half of a surrogate pair, which a server's JSON may hold as an escape, becomes a question mark.
    """
    if isinstance(value, bool | int) or value is None:
        return value
    if isinstance(value, str):
        return value if value.isascii() else value.encode(errors="replace").decode()
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {plain(str(key)): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "size", None) is not None:
        shape = getattr(value, "shape", ())
        return plain(item()) if math.prod(shape) == 1 else plain(value.tolist())
    return plain(str(value))
