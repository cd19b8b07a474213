"""The artifact store: stage, validate, hash, commit; find, verify and read back.

Layout under a home:

    artifacts/objects/<digest>/            files and artifact.json of one artifact, read-only
    artifacts/references/<digest>.json     an artifact used in place, in a folder the user supplied (see imports)
    artifacts/names/<name>/vN.json         one version: the full record of one production of an artifact

and, always on this machine: `artifacts/staging/` (being written), `artifacts/verified/` (size and time of files
whose hash was right).

Content decides identity: the same type and bytes are one object, however often they are produced. Which step and
which inputs produced it is the version's record. Commit order is object, then version; a kill in between leaves an
object no one names, which the next production of the same content reuses.
"""

import fcntl
import json
import logging
import os
import re
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from nemotron_steps.artifacts.backend import Backend, open_backend
from nemotron_steps.artifacts.files import (
    copy_tree,
    hash_tree,
    is_digest,
    plain,
    remove_tree,
    remove_unfinished,
    replace_links,
    sha256_file,
    stat_of,
    storage_errors,
    to_json_bytes,
    tree_files,
    write_atomic,
)
from nemotron_steps.artifacts.imports import Imports, default_name, require_type
from nemotron_steps.artifacts.integrity import (
    NAMES,
    OBJECTS,
    REFERENCES,
    differences,
    gone,
    problems,
    require_supplied,
)
from nemotron_steps.artifacts.models import (
    MANIFEST_NAME,
    Artifact,
    Edge,
    FileRecord,
    Producer,
    is_artifact_name,
    parse_ref,
    short_digest,
    tree_digest,
)
from nemotron_steps.artifacts.records import artifact_bytes, parse_artifact
from nemotron_steps.artifacts.validators import validate
from nemotron_steps.config.names import nearest
from nemotron_steps.errors import ArtifactError, StorageError, UnknownNameError

logger = logging.getLogger(__name__)

_DIGEST_START = re.compile(r"[0-9a-f]{8,64}")
_VERSION_FILE = re.compile(r"v([1-9][0-9]{0,8})\.json")


class ArtifactStore:
    """Artifacts of one home: a folder, or any fsspec URL (see backend.open_backend)."""

    def __init__(self, home: str | Path | Backend | None = None) -> None:
        self.backend: Backend = open_backend(home) if home is None or isinstance(home, str | Path) else home
        self.imports = Imports(self.backend.private / "imports")

    @contextmanager
    def staging(self, beside: Path | None = None) -> Iterator[Path]:
        """A fresh folder to fill, on the file system artifacts are committed to, or `beside` a path that it will be
        renamed to; deleted on exit if still there."""
        root = self.backend.local("artifacts/staging") if beside is None else beside.parent
        prefix = "" if beside is None else f".{beside.name}.export-"
        root.mkdir(parents=True, exist_ok=True)
        for left in self.abandoned(root, prefix):
            left.unlink(missing_ok=True) if left.is_symlink() or not left.is_dir() else remove_tree(left)
        lock = None
        while lock is None:  # another process may take it for dead until it is locked
            folder = root / f"{prefix}{uuid.uuid4().hex}"
            folder.mkdir()
            lock = _locked(folder, fcntl.LOCK_EX)
        try:
            yield folder
        finally:
            remove_tree(folder)
            os.close(lock)

    def abandoned(self, root: Path | None = None, prefix: str = "") -> Iterator[Path]:
        """What is in staging, or of exports in `root`, and nobody's: of processes that were killed. Each is locked
        while it is looked at."""
        root = root or self.backend.local("artifacts/staging")
        for left in root.iterdir() if root.is_dir() else ():
            if prefix and not _is_export(left, prefix):
                continue
            if left.is_symlink() or not left.is_dir():  # nothing of ours
                yield left
            elif (dead := _locked(left, fcntl.LOCK_EX | fcntl.LOCK_NB)) is not None:
                try:
                    yield left
                finally:
                    os.close(dead)

    @contextmanager
    def naming(self, *, alone: bool = False) -> Iterator[None]:
        """Held while objects are committed and named; `alone`: while those without a name are deleted."""
        folder = self.backend.local(OBJECTS)
        with storage_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        lock = _locked(folder, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        try:
            yield
        finally:
            if lock is not None:
                os.close(lock)

    def commit(self, staged: Path, type_name: str, *, name: str, **about: Any) -> Artifact:
        """Publish a filled folder as the next version of `name`, moving it away. As `stage` and `publish`."""
        return self.publish(self.stage(staged, type_name, name=name, **about))

    def stage(
        self,
        staged: Path,
        type_name: str,
        *,
        name: str,
        supertypes: Sequence[str] = (),
        attributes: Mapping[str, Any] | None = None,
        producer: Producer | None = None,
        inputs: Sequence[Edge] = (),
        source: str = "",
    ) -> Artifact:
        """Validate and hash a filled folder, for `publish`. Attributes read from the files win over `attributes`; links
        to files of the folder become files.

        Raises ArtifactError or DataError if the folder is empty, links to files elsewhere or is not valid for its type.
        """
        if not is_artifact_name(name):
            expected = "at most 200 letters, digits and ._-/"
            raise ArtifactError("this cannot name an artifact", expected=expected, found=name)
        # A commit killed while it wrote the manifest must not make the next one another artifact.
        remove_unfinished(staged / MANIFEST_NAME)
        replace_links(staged)
        found = validate(type_name, staged, supertypes)
        files = tuple(hash_tree(staged))
        if not files:
            raise ArtifactError("the output is empty", where=str(staged), expected="at least one file")
        return Artifact(
            type=type_name,
            digest=tree_digest(type_name, files),
            path=staged,
            attributes=plain({**(attributes or {}), **found}),
            files=files,
            name=name,
            producer=producer,
            inputs=tuple(inputs),
            created=time.time(),
            source=source,
        )

    def publish(self, artifact: Artifact) -> Artifact:
        """Move a staged artifact away as the next version of its name. The newest, if it is the same production
        (content, producer but for the run, inputs), is returned instead."""
        path = f"{OBJECTS}/{artifact.digest}"
        there = self.backend.read(f"{path}/{MANIFEST_NAME}") is not None
        corrupt = there and bool(problems(self, artifact))
        write_atomic(artifact.path / MANIFEST_NAME, artifact_bytes(artifact))
        with self.naming():
            self.backend.commit_tree(artifact.path, path, replace=corrupt)
            local = self.backend.local_tree(path, artifact.files)
            self._remember_verified(artifact.digest, local, artifact.files)
            return self._new_version(artifact.at(local))

    def add(
        self, path: Path, *, type_name: str | None = None, supertypes: Sequence[str] = (), name: str | None = None
    ) -> Artifact:
        """Copy a file or folder of the user's into the home as an artifact. The type is sniffed unless given."""
        if path.is_dir():
            tree_files(path, user_folder=True)  # a link that leads out is refused before anything is read
        type_name = type_name or require_type(path)
        # Checked where it lies, so that an error names the user's own file; the copy is checked again at commit.
        validate(type_name, path, supertypes)
        with self.staging() as folder:
            copy_tree(path, folder / "tree")
            name, source = name or default_name(path), str(path.absolute())
            return self.commit(folder / "tree", type_name, name=name, supertypes=supertypes, source=source)

    def reference(
        self,
        path: Path,
        *,
        type_name: str | None = None,
        supertypes: Sequence[str] = (),
        name: str | None = None,
        licence: str = "",
    ) -> Artifact:
        """Take a folder of the user's as an artifact in place, without copying it; a single file is copied."""
        if path.is_file():
            return self.add(path, type_name=type_name, name=name, supertypes=supertypes)
        artifact = self.imports.identify(path, type_name=type_name, supertypes=supertypes, name=name)
        if licence:
            artifact = replace(artifact, attributes={**artifact.attributes, "license": licence})
        with self.naming():
            self.backend.write(f"{REFERENCES}/{artifact.digest}.json", artifact_bytes(artifact))
            self._remember_verified(artifact.digest, artifact.path, artifact.files)
            return self._new_version(artifact)

    def attribute(self, artifact: Artifact, producer: Producer, inputs: Sequence[Edge]) -> Artifact:
        """The next version of a committed artifact's name, of the same content, as another production."""
        with self.naming():
            return self._new_version(replace(artifact, producer=producer, inputs=tuple(inputs), created=time.time()))

    def find(self, ref: str) -> Artifact:
        """The record of `NAME`, `NAME:vN`, `NAME:latest`, or a digest of at least 8 hex digits; no file of it is
        read."""
        if _DIGEST_START.fullmatch(ref):
            references = (name.removesuffix(".json") for name in self.backend.names(REFERENCES))
            for digest in (*self.backend.names(OBJECTS), *references):
                if digest.startswith(ref) and is_digest(digest):
                    return self._by_digest(digest)
        name, version = parse_ref(ref)
        versions = self.versions(name)
        wanted = versions[-1:] if version == "latest" else [int(version[1:])]
        if not wanted or wanted[0] not in versions:
            raise self._unknown(ref, name, versions)
        return self._version(name, wanted[0])

    def _by_digest(self, digest: str) -> Artifact:
        """The first version of a digest."""
        path = f"{OBJECTS}/{digest}/{MANIFEST_NAME}"
        record = self.backend.read(path)
        artifact = self.reference_record(digest) if record is None else self._parsed(record, path, digest=digest)
        # The object was written before its number was known; a kill in between leaves it without one.
        versions = self.list_artifacts(name=artifact.name)
        return next((version for version in versions if version.digest == digest), artifact)

    def reference_record(self, digest: str) -> Artifact:
        """The record of an artifact that is used in place. UnknownNameError if there is none."""
        path = f"{REFERENCES}/{digest}.json"
        record = self.backend.read(path) if is_digest(digest) else None
        if record is None:
            what, hints = "no artifact has this digest", ("steps artifacts list",)
            raise UnknownNameError(what, where=self.backend.url, found=short_digest(digest), hints=hints)
        return self._parsed(record, path, digest=digest)

    def open(self, ref: str | Artifact) -> Artifact:
        """An artifact ready to be read: on this machine, with the files that were committed and no others.

        Files whose size, times and inode are those of the last successful check are trusted. Raises ArtifactError for
        what is corrupt, and for a folder outside the home that this user never supplied."""
        artifact = self.find(ref) if isinstance(ref, str) else ref
        artifact = artifact.at(self.local_path(artifact))
        wrong = self._problems(artifact, artifact.path)
        if wrong and not artifact.location and self.backend.drop_copy(f"{OBJECTS}/{artifact.digest}"):
            # Perhaps only this machine's copy is bad.
            wrong = self._problems(artifact, self.local_path(artifact), trust=False)
        if wrong:
            raise wrong[0]
        return artifact

    def verify(self, ref: str | Artifact) -> list[ArtifactError]:
        """Hash every file of an artifact where the home has it; every problem found, empty if it is whole."""
        artifact = self.find(ref) if isinstance(ref, str) else ref
        return problems(self, artifact)

    def exists(self, digest: str) -> bool:
        """Whether an artifact of this digest is committed (or referenced) here."""
        return is_digest(digest) and (
            self.backend.read(f"{OBJECTS}/{digest}/{MANIFEST_NAME}") is not None
            or self.backend.read(f"{REFERENCES}/{digest}.json") is not None
        )

    def names(self) -> list[str]:
        """Every artifact name, sorted."""
        found = (name.replace("~", "/") for name in self.backend.names(NAMES))
        return sorted(name for name in found if is_artifact_name(name))

    def versions(self, name: str) -> list[int]:
        """The versions of a name, oldest first; empty if there is no such name."""
        found = self.backend.names(_folder_of(name)) if is_artifact_name(name) else []
        return sorted(int(match[1]) for entry in found if (match := _VERSION_FILE.fullmatch(entry)))

    def records(self, name: str | None = None) -> Iterator[tuple[str, Artifact | ArtifactError]]:
        """(reference, record) of every version, by name and version; an error for a record that is broken."""
        for each in self.names() if name is None else [name]:
            for version in self.versions(each):
                ref = f"{each}:v{version}"
                try:
                    yield ref, self._version(each, version)
                except UnknownNameError:
                    continue
                except ArtifactError as error:
                    yield ref, error

    def list_artifacts(self, *, type_name: str | None = None, name: str | None = None) -> list[Artifact]:
        """The record of every version, by name and version. A broken record is left out, with a warning."""
        artifacts = []
        for ref, record in self.records(name):
            if isinstance(record, ArtifactError):
                logger.warning("the record of artifact %s is broken (steps artifacts verify): %s", ref, record.what)
            elif type_name is None or record.type == type_name:
                artifacts.append(record)
        return artifacts

    def _new_version(self, artifact: Artifact) -> Artifact:
        while True:
            versions = self.versions(artifact.name)
            if versions:
                try:
                    newest = self._version(artifact.name, versions[-1])
                except ArtifactError as error:
                    # What was just made must not be lost over it.
                    logger.warning("the newest record of %s is broken: %s", artifact.name, error.what)
                else:
                    if _production(newest) == _production(artifact):
                        return newest.at(artifact.path)
            numbered = replace(artifact, version=(versions[-1] if versions else 0) + 1, home=self.backend.url)
            path = f"{_folder_of(artifact.name)}/v{numbered.version}.json"
            if self.backend.create(path, artifact_bytes(numbered)):
                return numbered

    def _version(self, name: str, version: int) -> Artifact:
        path = f"{_folder_of(name)}/v{version}.json"
        record = self.backend.read(path)
        if record is None:
            raise self._unknown(f"{name}:v{version}", name, self.versions(name))
        return self._parsed(record, path, ref=f"{name}:v{version}")

    def _parsed(self, data: bytes, path: str, *, digest: str | None = None, ref: str | None = None) -> Artifact:
        """A record that must be that of a digest or of a reference, with its path filled in."""
        where = self.backend.where(path)
        artifact = replace(parse_artifact(data, where), home=self.backend.url)
        expected, found = (digest, artifact.digest) if digest is not None else (ref, artifact.ref)
        if expected != found or (path.startswith(REFERENCES) and not artifact.location):
            what, expected, found = "the record is another artifact's", f"the record of {expected}", f"that of {found}"
            hints = ("steps artifacts verify",)
            raise ArtifactError(what, where=where, expected=expected, found=found, hints=hints)
        return artifact.at(Path(artifact.location or self.backend.scratch / OBJECTS / artifact.digest))

    def local_path(self, artifact: Artifact) -> Path:
        """The folder that an artifact is read from, fetched where the home is elsewhere; its files are not checked."""
        if self.backend.read(f"{OBJECTS}/{artifact.digest}/{MANIFEST_NAME}") is not None:
            return self.backend.local_tree(f"{OBJECTS}/{artifact.digest}", artifact.files)
        if not artifact.location or not Path(artifact.location).is_dir():
            raise gone(artifact, self.backend)
        require_supplied(self, artifact)
        return Path(artifact.location)

    def _problems(self, artifact: Artifact, folder: Path, *, trust: bool = True) -> list[ArtifactError]:
        trusted: dict[str, Any] = {}  # size and time of each file when its hash was last right
        if trust:
            with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
                note = json.loads(self._note(artifact.digest).read_bytes())
                trusted = dict(note["files"]) if note["folder"] == str(folder) else {}
        records = {record.path: record for record in artifact.files}
        found: list[FileRecord] = []
        checked = False
        for path in tree_files(folder, user_folder=str(folder) == artifact.location):
            name, stat = path.relative_to(folder).as_posix(), stat_of(path)
            if name in records and trusted.get(name) != stat:
                checked = True
                found.append(FileRecord(name, stat[0], sha256_file(path)))
            else:
                found.append(records.get(name) or FileRecord(name, stat[0], ""))
        wrong = differences(artifact, found, str(folder))
        if checked and not wrong:
            self._remember_verified(artifact.digest, folder, artifact.files)
        return wrong

    def _remember_verified(self, digest: str, folder: Path, files: Sequence[FileRecord]) -> None:
        record = {"folder": str(folder), "files": {f.path: stat_of(folder / f.path) for f in files}}
        try:
            write_atomic(self._note(digest), to_json_bytes(record))
        except StorageError as error:
            # Reading must work on a full or read-only disk; the files are then hashed again next time.
            logger.warning("could not record that %s is verified: %s", short_digest(digest), error.what)

    def _note(self, digest: str) -> Path:
        return self.backend.local(f"artifacts/verified/{digest}.json")

    def _unknown(self, ref: str, name: str, versions: Sequence[int]) -> UnknownNameError:
        if versions:
            what, expected = f"artifact '{name}' has no such version", ", ".join(f"v{v}" for v in versions[-8:])
            return UnknownNameError(what, expected=expected, found=ref, hints=(f"steps artifacts show {name}:latest",))
        near = nearest(name, self.names())
        return UnknownNameError(
            f"no artifact is called '{name}'",
            where=self.backend.url,
            expected=" or ".join(near) or None,
            found=ref,
            hints=(*(f"steps artifacts show {each}" for each in near), "steps artifacts list"),
        )


def _is_export(path: Path, prefix: str) -> bool:
    """Whether it is a folder as this user's exports are named."""
    named = re.fullmatch(re.escape(prefix) + "[0-9a-f]{32}", path.name) and not path.is_symlink() and path.is_dir()
    return bool(named) and path.stat().st_uid == os.getuid()


def _locked(folder: Path, how: int) -> int | None:
    """A descriptor that holds a staging folder's lock; None where it is gone, or another process has it."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    with suppress(BlockingIOError):
        fcntl.flock(descriptor, how)
        if folder.exists():
            return descriptor
    os.close(descriptor)
    return None


def _production(artifact: Artifact) -> tuple[Any, ...]:
    producer = artifact.producer
    made_by = (producer.step, producer.port, producer.cache_key) if producer else None
    inputs = tuple((edge.port, edge.digest) for edge in artifact.inputs)
    return artifact.digest, dict(artifact.attributes), made_by, inputs, artifact.location


def _folder_of(name: str) -> str:
    return f"{NAMES}/{name.replace('/', '~')}"
