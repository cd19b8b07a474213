"""Where a home's records and artifact folders live: a local folder, or any fsspec URL.

Both backends keep one promise: `commit_tree` makes a folder appear whole or not at all. Locally that is one
rename; on an object store, which has none, the files are uploaded first and `artifact.json` last, and a folder
without it does not exist.

Every path handed in is checked to stay in the home (see confinement), for a record may have named it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from nemotron_steps.artifacts.confinement import confined
from nemotron_steps.artifacts.files import (
    create_exclusive,
    hash_tree,
    remove_tree,
    seal_tree,
    set_aside,
    storage_errors,
    sync_folder,
    write_atomic,
)
from nemotron_steps.artifacts.models import MANIFEST_NAME, FileRecord
from nemotron_steps.errors import StorageError

DEFAULT_HOME = ".steps"


class Backend(Protocol):
    """Records and folders under one home. Paths are relative, posix; ArtifactError for one that leaves the home."""

    url: str
    """What the user called the home."""
    scratch: Path
    """A local folder for staging, locks, work folders and copies; the home itself if that is local."""
    private: Path
    """A local folder of this user's own, in no home: what lies there was written by this user."""

    def read(self, path: str) -> bytes | None:
        """A record's content, None if it is not there."""

    def write(self, path: str, data: bytes) -> None:
        """Replace a record atomically."""

    def create(self, path: str, data: bytes) -> bool:
        """Write a record unless it exists; whether this call wrote it."""

    def names(self, path: str) -> list[str]:
        """Names directly under a folder, sorted; empty if it is not there."""

    def commit_tree(self, staged: Path, path: str, *, replace: bool = False) -> None:
        """Publish a staged folder, which holds artifact.json, under `path`.

        A folder already there stays, unless `replace` says that it is corrupt.
        """

    def local_tree(self, path: str, files: Sequence[FileRecord]) -> Path:
        """A local folder with the content of a committed folder."""

    def stored_files(self, path: str) -> list[FileRecord]:
        """Every file of a committed folder but its artifact.json, hashed as it is in the home, not in a local copy."""

    def local(self, path: str) -> Path:
        """The place of `path` on this machine, whether or not anything is there."""

    def drop_copy(self, path: str) -> bool:
        """Delete the local copy of a committed folder; false if what is local is the only one."""

    def upload(self, source: Path, path: str) -> None:
        """Copy a plain local folder to `path`, file by file (run folders; not atomic)."""


class LocalBackend:
    """A home that is a folder of this machine or of a shared file system."""

    def __init__(self, root: Path, cache: Path | None = None) -> None:
        self.root = root
        self.url = str(root)
        self.scratch = root
        self.private = cache or default_cache()

    def read(self, path: str) -> bytes | None:
        """See Backend."""
        place = self.local(path)
        try:
            return place.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise StorageError("reading the home failed", where=str(place), found=error.strerror) from error

    def write(self, path: str, data: bytes) -> None:
        """See Backend."""
        write_atomic(self.local(path), data)

    def create(self, path: str, data: bytes) -> bool:
        """See Backend."""
        return create_exclusive(self.local(path), data)

    def names(self, path: str) -> list[str]:
        """See Backend."""
        place = self.local(path)
        try:
            return sorted(name for name in os.listdir(place) if not name.startswith("."))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise StorageError("reading the home failed", where=str(place), found=error.strerror) from error

    def commit_tree(self, staged: Path, path: str, *, replace: bool = False) -> None:
        """See Backend."""
        target = self.local(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if replace:
            set_aside(target)
        seal_tree(staged)
        with storage_errors(target):
            try:
                staged.rename(target)
            except OSError:
                # A folder is replaced only by an empty one: someone else committed the same content first.
                if not (target / MANIFEST_NAME).is_file():
                    raise
                remove_tree(staged)
            sync_folder(target.parent)

    def local_tree(self, path: str, files: Sequence[FileRecord]) -> Path:
        """See Backend."""
        return self.local(path)

    def stored_files(self, path: str) -> list[FileRecord]:
        """See Backend."""
        return hash_tree(self.local(path))

    def local(self, path: str) -> Path:
        """See Backend."""
        return confined(self.root, path)

    def drop_copy(self, path: str) -> bool:
        """See Backend."""
        return False

    def upload(self, source: Path, path: str) -> None:
        """Nothing to do: the folder is already in the home."""


def open_backend(home: str | Path | None = None, cache: Path | None = None) -> Backend:
    """The backend of a home: the argument, else STEPS_HOME, else `.steps` in the working directory.

    Raises:
        StorageError: it is there and is not a folder.
    """
    text = str(home) if home is not None else os.environ.get("STEPS_HOME") or DEFAULT_HOME
    if text.startswith("file://"):
        text = text.removeprefix("file://")
    if "://" in text or text.startswith("memory:"):
        from nemotron_steps.artifacts.object_store import FsspecBackend

        return FsspecBackend(text, cache or default_cache())
    root = Path(text).expanduser().absolute()
    if root.exists() and not root.is_dir():
        raise StorageError(
            "the home is not a folder",
            where=str(root),
            expected="a folder, or a path to make one at",
            hints=("--home DIR", "export STEPS_HOME=DIR"),
        )
    return LocalBackend(root, cache)


def default_cache() -> Path:
    """Where copies of remote artifacts are kept: STEPS_CACHE, else the user's cache folder."""
    explicit = os.environ.get("STEPS_CACHE")
    if explicit:
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nemotron_steps"
