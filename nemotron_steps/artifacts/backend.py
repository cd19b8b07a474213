"""Where a home's records and artifact folders live: a local folder, or any fsspec URL.

Both backends keep one promise: `commit_tree` makes a folder appear whole or not at all. Locally that is one
rename; on an object store, which has none, the files are uploaded first and `artifact.json` last, and a folder
without it does not exist.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from nemotron_steps.artifacts.files import (
    create_exclusive,
    remove_tree,
    seal_tree,
    storage_errors,
    sync_folder,
    tree_files,
    write_atomic,
)
from nemotron_steps.artifacts.models import MANIFEST_NAME, FileRecord
from nemotron_steps.errors import ArtifactError, RequestError, StorageError, UnsupportedError

DEFAULT_HOME = ".steps"


class Backend(Protocol):
    """Records and folders under one home. Paths are relative, posix."""

    url: str
    """What the user called the home."""
    scratch: Path
    """A local folder for staging, locks, work folders and copies; the home itself if that is local."""

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

    def drop_copy(self, path: str) -> bool:
        """Delete the local copy of a committed folder; false if what is local is the only one."""

    def upload(self, source: Path, path: str) -> None:
        """Copy a plain local folder to `path`, file by file (run folders; not atomic)."""


class LocalBackend:
    """A home that is a folder of this machine or of a shared file system."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = str(root)
        self.scratch = root

    def read(self, path: str) -> bytes | None:
        """See Backend."""
        try:
            return (self.root / path).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def write(self, path: str, data: bytes) -> None:
        """See Backend."""
        write_atomic(self.root / path, data)

    def create(self, path: str, data: bytes) -> bool:
        """See Backend."""
        return create_exclusive(self.root / path, data)

    def names(self, path: str) -> list[str]:
        """See Backend."""
        try:
            return sorted(name for name in os.listdir(self.root / path) if not name.startswith("."))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def commit_tree(self, staged: Path, path: str, *, replace: bool = False) -> None:
        """See Backend."""
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if replace:
            _discard(target)
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
        return self.root / path

    def drop_copy(self, path: str) -> bool:
        """See Backend."""
        return False

    def upload(self, source: Path, path: str) -> None:
        """Nothing to do: the folder is already in the home."""


class FsspecBackend:
    """A home on an object store or any other fsspec file system, with a local cache of what is read."""

    def __init__(self, url: str, cache: Path | None = None) -> None:
        import fsspec

        try:
            filesystem, root = fsspec.core.url_to_fs(url)
        except ImportError as error:
            protocol = url.split("://", 1)[0]
            raise UnsupportedError(
                f"no file system package for '{protocol}://' is installed",
                where=url,
                found=str(error),
                hints=("pip install 'nemotron-steps[s3]'",) if protocol in ("s3", "s3a") else (),
            ) from error
        except ValueError as error:
            raise RequestError("the home URL is not understood", where=url, found=str(error)) from error
        self._fs: Any = filesystem
        self._root = root.rstrip("/")
        self.url = url
        name = hashlib.sha256(f"{filesystem.protocol}:{self._root}".encode()).hexdigest()[:16]
        self.scratch = (cache or default_cache()) / name

    def read(self, path: str) -> bytes | None:
        """See Backend."""
        self._fs.invalidate_cache()
        try:
            data: bytes = self._fs.cat_file(self._at(path))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._failed("reading", path, error) from error
        return data

    def write(self, path: str, data: bytes) -> None:
        """See Backend."""
        try:
            self._fs.pipe_file(self._at(path), data)
        except OSError as error:
            raise self._failed("writing", path, error) from error

    def create(self, path: str, data: bytes) -> bool:
        """See Backend."""
        self._fs.invalidate_cache()
        try:
            self._fs.pipe_file(self._at(path), data, mode="create")
        except FileExistsError:
            return False
        except OSError as error:
            if getattr(error.__cause__, "response", {}).get("Error", {}).get("Code") == "PreconditionFailed":
                return False
            raise self._failed("writing", path, error) from error
        return True

    def names(self, path: str) -> list[str]:
        """See Backend."""
        self._fs.invalidate_cache()
        try:
            found = self._fs.ls(self._at(path), detail=False)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._failed("listing", path, error) from error
        return sorted({name.rstrip("/").rsplit("/", 1)[-1] for name in found} - {path.rsplit("/", 1)[-1]})

    def commit_tree(self, staged: Path, path: str, *, replace: bool = False) -> None:
        """See Backend."""
        local = self.scratch / path
        if replace:
            _discard(local)
        if replace or self.read(f"{path}/{MANIFEST_NAME}") is None:
            self._put(staged, path)
            self.write(f"{path}/{MANIFEST_NAME}", (staged / MANIFEST_NAME).read_bytes())
        seal_tree(staged)
        local.parent.mkdir(parents=True, exist_ok=True)
        # What was just written is the first thing the next step reads: keep it as the local copy.
        if local.exists():
            remove_tree(staged)
        else:
            staged.rename(local)

    def local_tree(self, path: str, files: Sequence[FileRecord]) -> Path:
        """See Backend."""
        local = self.scratch / path
        if (local / MANIFEST_NAME).is_file():
            return local
        partial = local.with_name(f"{local.name}.{uuid.uuid4().hex[:8]}.partial")
        partial.mkdir(parents=True)
        for name in [*(record.path for record in files), MANIFEST_NAME]:
            target = partial / name
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._fs.get_file(self._at(f"{path}/{name}"), str(target))
            except FileNotFoundError as error:
                raise ArtifactError(
                    "a file of the artifact is missing from the store",
                    where=f"{self.url.rstrip('/')}/{path}/{name}",
                    hints=("run the step that produced it again with --force",),
                ) from error
            except OSError as error:
                raise self._failed("reading", f"{path}/{name}", error) from error
        try:
            partial.rename(local)
        except OSError:
            if not (local / MANIFEST_NAME).is_file():
                raise
            remove_tree(partial)
        return local

    def drop_copy(self, path: str) -> bool:
        """See Backend."""
        _discard(self.scratch / path)
        return True

    def upload(self, source: Path, path: str) -> None:
        """See Backend."""
        self._put(source, path)

    def _put(self, source: Path, path: str) -> None:
        for file in tree_files(source):
            name = file.relative_to(source).as_posix()
            try:
                self._fs.put_file(str(file), self._at(f"{path}/{name}"))
            except OSError as error:
                raise self._failed("writing", f"{path}/{name}", error) from error

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}"

    def _failed(self, action: str, path: str, error: OSError) -> StorageError:
        return StorageError(
            f"{action} the store failed",
            where=f"{self.url.rstrip('/')}/{path}",
            found=str(error),
            hints=("check the credentials and the address of the store, then run the same command again",),
        )


def open_backend(home: str | Path | None = None, cache: Path | None = None) -> Backend:
    """The backend of a home: the argument, else STEPS_HOME, else `.steps` in the working directory.

    Raises:
        StorageError: it is there and is not a folder.
    """
    text = str(home) if home is not None else os.environ.get("STEPS_HOME") or DEFAULT_HOME
    if text.startswith("file://"):
        text = text.removeprefix("file://")
    if "://" in text or text.startswith("memory:"):
        return FsspecBackend(text, cache)
    root = Path(text).expanduser().absolute()
    if root.exists() and not root.is_dir():
        raise StorageError(
            "the home is not a folder",
            where=str(root),
            expected="a folder, or a path to make one at",
            hints=("--home DIR", "export STEPS_HOME=DIR"),
        )
    return LocalBackend(root)


def _discard(folder: Path) -> None:
    if not folder.exists():
        return
    # Renamed first: a reader never sees a folder with half of its files deleted.
    aside = folder.with_name(f"{folder.name}.{uuid.uuid4().hex[:8]}.corrupt")
    folder.rename(aside)
    remove_tree(aside)


def default_cache() -> Path:
    """Where copies of remote artifacts are kept: STEPS_CACHE, else the user's cache folder."""
    explicit = os.environ.get("STEPS_CACHE")
    if explicit:
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nemotron_steps"
