"""Where a home's records and artifact folders live: a local folder, or any fsspec URL.

`commit_tree` makes a folder appear whole or not at all. Locally that is one rename; on an object store, which has none,
the files are uploaded first and `artifact.json` last, and a folder without it does not exist. Every path handed in is
checked to stay in the home (see files), for a record may have named it.
"""
# ruff: noqa: D102  Backend says what each method does

import hashlib
import inspect
import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nemotron_steps.artifacts.files import (
    confined,
    create_exclusive,
    hash_tree,
    remove_tree,
    require_relative,
    seal_tree,
    set_aside,
    storage_errors,
    sync_folder,
    walk,
    write_atomic,
)
from nemotron_steps.artifacts.models import MANIFEST_NAME, FileRecord
from nemotron_steps.errors import ArtifactError, RequestError, StorageError, StorageUnreachableError, UnsupportedError

DEFAULT_HOME = ".steps"
_NO_ANSWER = (
    *("ConnectionError", "TimeoutError", "HTTPClientError", "ConnectionClosedError"),
    *("ClientConnectionError", "ClientPayloadError", "IncompleteReadError"),
)
"""Classes, by name, of Python's, botocore's and aiohttp's errors for a server that does not answer to the end."""


class Backend:
    """Records and folders under one home: a folder of this machine or of a shared file system.

    Paths are relative, posix; ArtifactError for one that leaves the home.
    """

    def __init__(self, root: Path, cache: Path | None = None) -> None:
        self.url = str(root)
        """What the user called the home."""
        self.scratch = root
        """A local folder for staging, locks, work folders and copies; here the home itself."""
        self.private = cache or default_cache()
        """A local folder of this user's own, in no home: what lies there was written by this user."""

    def read(self, path: str) -> bytes | None:
        """A record's content, None if it is not there."""
        place = self.local(path)
        with _reading(place):
            return place.read_bytes()
        return None

    def write(self, path: str, data: bytes) -> None:
        """Replace a record atomically."""
        write_atomic(self.local(path), data)

    def create(self, path: str, data: bytes) -> bool:
        """Write a record unless it exists; whether this call wrote it."""
        return create_exclusive(self.local(path), data)

    def names(self, path: str) -> list[str]:
        """Names directly under a folder, sorted; empty if it is not there."""
        place = self.local(path)
        with _reading(place):
            return sorted(name for name in os.listdir(place) if not name.startswith("."))
        return []

    def commit_tree(self, staged: Path, path: str, *, replace: bool = False) -> None:
        """Publish a staged folder, which holds artifact.json. One already there stays, unless `replace`: it is
        corrupt."""
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
        """A local folder with the content of a committed folder."""
        return self.local(path)

    def stored_files(self, path: str) -> list[FileRecord]:
        """Every file of a committed folder but its artifact.json, hashed as it is in the home, not in a local copy."""
        return hash_tree(self.local(path))

    def where(self, path: str) -> str:
        """The place of `path` in errors."""
        return f"{self.url.rstrip('/')}/{path}"

    def local(self, path: str) -> Path:
        """The place of `path` on this machine, whether or not anything is there."""
        return confined(self.scratch, path)

    def drop_copy(self, path: str) -> bool:
        """Delete the local copy of a committed folder; false if what is local is the only one."""
        return False

    def upload(self, source: Path, path: str) -> None:
        """Copy a plain local folder (a run's) to `path`, file by file, not atomically; here it is there already."""


@contextmanager
def _reading(place: Path) -> Iterator[None]:
    """StorageError for what cannot be read; what is not there ends the block."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise StorageError("reading the home failed", where=str(place), found=error.strerror) from error


class FsspecBackend(Backend):
    """A home on an object store, or any other file system that fsspec knows."""

    def __init__(self, url: str, cache: Path) -> None:
        import fsspec

        try:
            filesystem, root = fsspec.core.url_to_fs(url)
        except ImportError as error:
            what = f"no file system package for '{url.split('://', 1)[0]}://' is installed"
            hints = ("pip install 'nemotron-steps[s3]'",) if url.startswith(("s3://", "s3a://")) else ()
            raise UnsupportedError(what, where=url, found=str(error), hints=hints) from error
        except ValueError as error:
            raise RequestError("the home URL is not understood", where=url, found=str(error)) from error
        self._fs: Any = filesystem
        self._root = root.rstrip("/")
        # Records are small: not first a request for the size, as where a file might be read in several parts at once.
        read = inspect.signature(getattr(filesystem, "_cat_file", filesystem.cat_file))
        self._at_once = {"max_concurrency": 1} if "max_concurrency" in read.parameters else {}
        self.url = url
        self.private = cache
        name = hashlib.sha256(f"{filesystem.protocol}:{self._root}".encode()).hexdigest()[:16]
        self.scratch = cache / name

    def read(self, path: str) -> bytes | None:
        self._fs.invalidate_cache()
        with self._asking("reading", path, FileNotFoundError):
            data: bytes = self._fs.cat_file(self._at(path), **self._at_once)
            return data
        return None

    def write(self, path: str, data: bytes) -> None:
        with self._asking("writing", path):
            self._fs.pipe_file(self._at(path), data)

    def create(self, path: str, data: bytes) -> bool:
        self._fs.invalidate_cache()
        with self._asking("writing", path, FileExistsError):
            self._fs.pipe_file(self._at(path), data, mode="create")
            return True
        return False

    def names(self, path: str) -> list[str]:
        self._fs.invalidate_cache()
        found: list[str] = []
        with self._asking("listing", path, FileNotFoundError):
            found = self._fs.ls(self._at(path), detail=False)
        names = {name.rstrip("/").rsplit("/", 1)[-1] for name in found} - {path.rsplit("/", 1)[-1]}
        return sorted(name for name in names if not name.startswith("."))

    def commit_tree(self, staged: Path, path: str, *, replace: bool = False) -> None:
        local = self.local(path)
        if replace:
            set_aside(local)
            self._remove(path)
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
        local = self.local(path)
        if (local / MANIFEST_NAME).is_file():
            return local
        partial = local.with_name(f"{local.name}.{uuid.uuid4().hex[:8]}.partial")
        partial.mkdir(parents=True)
        for name in [*(record.path for record in files), MANIFEST_NAME]:
            target = partial / require_relative(name, self.where(f"{path}/{MANIFEST_NAME}"))
            target.parent.mkdir(parents=True, exist_ok=True)
            with self._asking("reading", f"{path}/{name}", FileNotFoundError):
                self._fs.get_file(self._at(f"{path}/{name}"), str(target))
            if not target.is_file():
                remove_tree(partial)
                where, hints = self.where(f"{path}/{name}"), ("run the step that produced it again with --force",)
                raise ArtifactError("a file of the artifact is missing from the store", where=where, hints=hints)
        try:
            partial.rename(local)
        except OSError:
            if not (local / MANIFEST_NAME).is_file():
                raise
            remove_tree(partial)
        return local

    def stored_files(self, path: str) -> list[FileRecord]:
        self._fs.invalidate_cache()
        root = self._at(path)
        with self._asking("listing", path):
            found = sorted(self._fs.find(root))
        records = []
        for name in found:
            inside = name.removeprefix(root + "/")
            if inside == MANIFEST_NAME:
                continue
            with self._asking("reading", inside), self._fs.open(name, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                records.append(FileRecord(inside, file.seek(0, os.SEEK_END), digest))
        return records

    def drop_copy(self, path: str) -> bool:
        set_aside(self.local(path))
        return True

    def upload(self, source: Path, path: str) -> None:
        self._put(source, path)

    def _put(self, source: Path, path: str) -> None:
        # Links are left out: a run folder has some for people (W&B's `latest-run`), an artifact none.
        for file in sorted(walk(source, follow=None)):
            if file == source / MANIFEST_NAME:
                continue
            name = file.relative_to(source).as_posix()
            with self._asking("writing", f"{path}/{name}"):
                self._fs.put_file(str(file), self._at(f"{path}/{name}"))

    def _remove(self, path: str) -> None:
        """Delete a folder of the store, the marker that commits it first."""
        root = self._at(path)
        with self._asking("writing", path):
            names = self._fs.find(root)
            for name in sorted(names, key=lambda name: name != f"{root}/{MANIFEST_NAME}"):
                self._fs.rm_file(name)

    def _at(self, path: str) -> str:
        return f"{self._root}/{require_relative(path, self.url)}"

    @contextmanager
    def _asking(self, action: str, path: str, answer: type[OSError] | None = None) -> Iterator[None]:
        """Turn what a file system package raises into a StorageError, but for an `answer`, which ends the block."""
        try:
            yield
        except Exception as error:
            # The server's answer that botocore keeps with an error, or with the one that caused it.
            kept = [getattr(each, "response", None) for each in (error, error.__cause__)]
            said = next((response for response in kept if isinstance(response, dict)), {})
            taken = answer is FileExistsError and said.get("Error", {}).get("Code") == "PreconditionFailed"
            if taken or (answer is not None and isinstance(error, answer)):
                return
            status: int = said.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            no_answer = any(each.__name__ in _NO_ANSWER for each in type(error).__mro__)
            unreachable = no_answer or status == 429 or status >= 500
            cls = StorageUnreachableError if unreachable else StorageError
            raise cls(
                "the store cannot be reached" if unreachable else f"{action} the store failed",
                where=self.where(path),
                found=f"{type(error).__name__}: {error}",
                hints=("check the credentials and the address of the store, then run the same command again",),
            ) from error


def open_backend(home: str | Path | None = None, cache: Path | None = None) -> Backend:
    """The backend of a home: the argument, else STEPS_HOME, else `.steps` in the working directory."""
    text = str(home) if home is not None else os.environ.get("STEPS_HOME") or DEFAULT_HOME
    if text.startswith("file://"):
        text = text.removeprefix("file://")
    if "://" in text or text.startswith("memory:"):
        return FsspecBackend(text, cache or default_cache())
    root = Path(text).expanduser().absolute()
    if root.exists() and not root.is_dir():
        expected, hints = "a folder, or a path to make one at", ("--home DIR", "export STEPS_HOME=DIR")
        raise StorageError("the home is not a folder", where=str(root), expected=expected, hints=hints)
    return Backend(root, cache)


def default_cache() -> Path:
    """Where copies of remote artifacts are kept: STEPS_CACHE, else the user's cache folder."""
    if own := os.environ.get("STEPS_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nemotron_steps"
