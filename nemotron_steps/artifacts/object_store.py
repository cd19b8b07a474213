"""A home on an object store, or any other file system that fsspec knows, with a local cache of what is read.

Every operation's failure is a StorageError; a StorageUnreachableError, which says that trying again may help, where
the server does not answer or is busy.
"""

from __future__ import annotations

import hashlib
import inspect
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nemotron_steps.artifacts.confinement import confined, require_relative, walk
from nemotron_steps.artifacts.files import remove_tree, seal_tree, set_aside
from nemotron_steps.artifacts.models import MANIFEST_NAME, FileRecord
from nemotron_steps.errors import ArtifactError, RequestError, StorageError, StorageUnreachableError, UnsupportedError


class FsspecBackend:
    """A Backend over fsspec.

    Args:
        url: an fsspec URL.
        cache: this user's folder for copies.

    Raises:
        UnsupportedError: the package for this kind of URL is not installed.
        RequestError: the URL is not understood.
    """

    def __init__(self, url: str, cache: Path) -> None:
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
        # Records are small: not first a request for the size, as where a file might be read in several parts at once.
        read = inspect.signature(getattr(filesystem, "_cat_file", filesystem.cat_file))
        self._at_once = {"max_concurrency": 1} if "max_concurrency" in read.parameters else {}
        self.url = url
        name = hashlib.sha256(f"{filesystem.protocol}:{self._root}".encode()).hexdigest()[:16]
        self.private = cache
        self.scratch = self.private / name

    def read(self, path: str) -> bytes | None:
        """See Backend."""
        self._fs.invalidate_cache()
        try:
            with self._asking("reading", path, FileNotFoundError):
                data: bytes = self._fs.cat_file(self._at(path), **self._at_once)
        except FileNotFoundError:
            return None
        return data

    def write(self, path: str, data: bytes) -> None:
        """See Backend."""
        with self._asking("writing", path):
            self._fs.pipe_file(self._at(path), data)

    def create(self, path: str, data: bytes) -> bool:
        """See Backend."""
        self._fs.invalidate_cache()
        try:
            with self._asking("writing", path, FileExistsError):
                self._fs.pipe_file(self._at(path), data, mode="create")
        except FileExistsError:
            return False
        return True

    def names(self, path: str) -> list[str]:
        """See Backend."""
        self._fs.invalidate_cache()
        try:
            with self._asking("listing", path, FileNotFoundError):
                found = self._fs.ls(self._at(path), detail=False)
        except FileNotFoundError:
            return []
        names = {name.rstrip("/").rsplit("/", 1)[-1] for name in found} - {path.rsplit("/", 1)[-1]}
        return sorted(name for name in names if not name.startswith("."))

    def commit_tree(self, staged: Path, path: str, *, replace: bool = False) -> None:
        """See Backend."""
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
        """See Backend."""
        local = self.local(path)
        if (local / MANIFEST_NAME).is_file():
            return local
        partial = local.with_name(f"{local.name}.{uuid.uuid4().hex[:8]}.partial")
        partial.mkdir(parents=True)
        for name in [*(record.path for record in files), MANIFEST_NAME]:
            target = partial / require_relative(name, f"{self.url.rstrip('/')}/{path}/{MANIFEST_NAME}")
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                with self._asking("reading", f"{path}/{name}", FileNotFoundError):
                    self._fs.get_file(self._at(f"{path}/{name}"), str(target))
            except FileNotFoundError as error:
                remove_tree(partial)
                raise ArtifactError(
                    "a file of the artifact is missing from the store",
                    where=f"{self.url.rstrip('/')}/{path}/{name}",
                    hints=("run the step that produced it again with --force",),
                ) from error
        try:
            partial.rename(local)
        except OSError:
            if not (local / MANIFEST_NAME).is_file():
                raise
            remove_tree(partial)
        return local

    def stored_files(self, path: str) -> list[FileRecord]:
        """See Backend."""
        self._fs.invalidate_cache()
        root = self._at(path)
        with self._asking("listing", path):
            found = sorted(self._fs.find(root))
        records = []
        for name in found:
            inside = name.removeprefix(root + "/")
            if inside != MANIFEST_NAME:
                records.append(self._hashed(name, inside))
        return records

    def local(self, path: str) -> Path:
        """See Backend."""
        return confined(self.scratch, path)

    def drop_copy(self, path: str) -> bool:
        """See Backend."""
        set_aside(self.local(path))
        return True

    def upload(self, source: Path, path: str) -> None:
        """See Backend."""
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

    def _hashed(self, name: str, inside: str) -> FileRecord:
        digest, size = hashlib.sha256(), 0
        with self._asking("reading", inside), self._fs.open(name, "rb") as file:
            while piece := file.read(1 << 22):
                digest.update(piece)
                size += len(piece)
        return FileRecord(inside, size, digest.hexdigest())

    def _at(self, path: str) -> str:
        return f"{self._root}/{require_relative(path, self.url)}"

    @contextmanager
    def _asking(self, action: str, path: str, answer: type[OSError] | None = None) -> Iterator[None]:
        """Turn what a file system package raises, each errors of its own, into a StorageError.

        Args:
            answer: FileNotFoundError or FileExistsError, where that is no failure.
        """
        try:
            yield
        except Exception as error:
            if answer is FileExistsError and _said(error).get("Error", {}).get("Code") == "PreconditionFailed":
                raise FileExistsError(path) from error
            if answer is not None and isinstance(error, answer):
                raise
            unreachable = _is_unreachable(error)
            cls = StorageUnreachableError if unreachable else StorageError
            raise cls(
                "the store cannot be reached" if unreachable else f"{action} the store failed",
                where=f"{self.url.rstrip('/')}/{path}",
                found=f"{type(error).__name__}: {error}",
                hints=("check the credentials and the address of the store, then run the same command again",),
            ) from error


_NO_ANSWER = {
    "ConnectionError",
    "TimeoutError",
    "HTTPClientError",
    "ConnectionClosedError",
    "ClientConnectionError",
    "ClientPayloadError",
    "IncompleteReadError",
}
"""Classes, by name, of Python's, botocore's and aiohttp's errors for a server that does not answer to the end."""


def _is_unreachable(error: BaseException) -> bool:
    if not _NO_ANSWER.isdisjoint(cls.__name__ for cls in type(error).__mro__):
        return True
    status: int = _said(error).get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return status == 429 or status >= 500


def _said(error: BaseException) -> dict[str, Any]:
    """The server's answer that botocore keeps with an error, or with the one that caused it; {} without one."""
    for each in (error, error.__cause__):
        response = getattr(each, "response", None)
        if isinstance(response, dict):
            return response
    return {}
