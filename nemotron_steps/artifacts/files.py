"""Local file work: paths that stay where they belong, hashing, atomic writes, storage failures, strict JSON.

A home may be shared, so paths that its records name are checked before they are used: the text (no `..`, not absolute),
and the file system (no symbolic link on the way leads out). Not so paths that the user typed.
"""

import errno
import hashlib
import json
import math
import os
import re
import shlex
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

from nemotron_steps.artifacts.models import MANIFEST_NAME, FileRecord
from nemotron_steps.errors import ArtifactError, StorageError

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
_LONGEST_PART = 255
_LONGEST_PATH = 4096
_DIGEST = re.compile(r"[0-9a-f]{64}")
_RUN_ID = re.compile(r"\w[\w.-]{0,199}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
"""Characters no path of a record has: control characters, and what stands for bytes that are not UTF-8."""


def is_digest(text: str) -> bool:
    """Whether text is a sha256 in hex, which names objects."""
    return bool(_DIGEST.fullmatch(text))


def is_run_id(text: str) -> bool:
    """Whether text can name a run's folder."""
    return bool(_RUN_ID.fullmatch(text))


def require_relative(path: str, where: str) -> str:
    """`path` if it is a plain relative posix path. ArtifactError naming `where` it was read if it is anything else."""
    parts = path.split("/")
    if (
        _CONTROL.search(path)
        or len(path.encode()) > _LONGEST_PATH
        or any(part in ("", ".", "..") or len(part.encode()) > _LONGEST_PART for part in parts)
    ):
        raise ArtifactError(
            "a record names a path that leaves its folder",
            where=where,
            expected="a relative path without `..`",
            found=repr(path if len(path) <= 120 else path[:117] + "..."),
            hints=("steps artifacts verify",),
        )
    return path


def confined(root: Path, relative: str) -> Path:
    """`root / relative`; ArtifactError where symbolic links lead out of the first folder of `relative`, which may
    itself be a link: people move `artifacts/` to another disk."""
    require_relative(relative, str(root))
    path, (first, *below) = root / relative, relative.split("/")
    base = os.path.join(root, first)
    # Resolving takes many times as long, and this is asked for every file that is read.
    if any(map(os.path.islink, accumulate(below, os.path.join, initial=base))):
        base, real = os.path.realpath(base), os.path.realpath(path)
        if real != base and not real.startswith(base.rstrip(os.sep) + os.sep):
            raise _leaves(path, real)
    return path


def walk(folder: Path, *, follow: Path | None, skip_hidden: bool = False) -> Iterator[Path]:
    """Every file below a folder. ArtifactError for names with control characters or not UTF-8.

    Symbolic links to files below `follow` count as the files, any other link is refused; with None links are left out.
    """
    pending = [folder]
    while pending:
        here = pending.pop()
        with os.scandir(here) as entries:
            for entry in entries:
                if skip_hidden and here == folder and entry.name.startswith("."):
                    continue
                path = here / entry.name
                if entry.is_symlink():
                    if follow is None:
                        continue
                    target = os.path.realpath(path)
                    if not target.startswith(os.path.realpath(follow).rstrip(os.sep) + os.sep):
                        raise _leaves(path, target)
                    if not os.path.isfile(target):
                        raise ArtifactError(
                            "a symbolic link does not lead to a file",
                            where=str(path),
                            expected="links to files only: a linked folder is not followed",
                            found=f"a link to {target}",
                        )
                elif entry.is_dir():
                    pending.append(path)
                    continue
                elif not entry.is_file():
                    continue
                if _CONTROL.search(path.name):
                    what = "a file's name holds control characters or is not UTF-8"
                    raise ArtifactError(what, where=repr(str(path)), hints=("rename it",))
                yield path


def link_root(folder: Path) -> Path:
    """Where links in a folder that a user supplies may lead: into itself; for a snapshot of the model hub's cache,
    whose files are all links, into that model's part of the cache."""
    real = Path(os.path.realpath(folder))
    is_snapshot = real.parent.name == "snapshots" and real.parent.parent.name.startswith(("models--", "datasets--"))
    return real.parent.parent if is_snapshot else real


def _leaves(path: Path, target: str) -> ArtifactError:
    return ArtifactError(
        "a symbolic link leads out of the folder",
        where=str(path),
        expected="files, or links to files of the same folder",
        found=f"a link to {target}",
        hints=(f"cp -rL {path.parent} COPY   # a copy with the files in place of links",),
    )


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
    """The files an artifact folder consists of, sorted, without its own artifact.json. In a folder that a user supplies
    hidden entries at its top (`.git`, `.cache`) do not count. Links as in `walk`."""
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


def stat_of(path: Path) -> list[int]:
    """What is compared before a file is hashed again. Nobody sets the time of the last change of a file's status."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


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
    while folder.exists():  # also where another process is at it
        with suppress(FileNotFoundError):
            shutil.rmtree(folder)


def set_aside(folder: Path) -> None:
    """Delete a folder, if it is there, so that no reader sees it with half of its files gone."""
    if folder.exists():
        remove_tree(renamed_aside(folder))


def renamed_aside(folder: Path) -> Path:
    """Give a folder a hidden name, under which it is to be deleted; its new path."""
    return folder.rename(folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.corrupt"))


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
            there, disk = _disk(Path(where))
            then = "make room and run the same command again: what was committed is kept"
            return StorageError(
                f"writing failed: {_STORAGE_ERRNOS[code]}",
                where=str(getattr(seen, "filename", None) or where),
                found=f"{disk.f_bavail * disk.f_frsize / 1e9:.2f} GB and {disk.f_favail:,} inodes free",
                hints=("--home DIR   # on a larger disk", f"df -h {shlex.quote(str(there))}   # {then}"),
            )
        seen = seen.__cause__ or seen.__context__
    return error if isinstance(error, StorageError) else None


def licence_in(folder: Path) -> str:
    """The licence in the front matter of a folder's README.md, as cards of the hub have it; empty without one."""
    import yaml

    with suppress(OSError, ValueError, yaml.YAMLError, LookupError, TypeError):
        front = yaml.safe_load((folder / "README.md").read_text(encoding="utf-8").split("---\n")[1])
        found = front["license_name" if front["license"] == "other" and "license_name" in front else "license"]
        return ", ".join(map(str, found)) if isinstance(found, list) else str(found or "")
    return ""


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
