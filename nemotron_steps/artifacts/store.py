"""The artifact store: stage, validate, hash, commit; find, verify and read back.

Layout under a home (paths of the backend):

    artifacts/objects/<digest>/            files and artifact.json of one artifact, read-only
    artifacts/references/<digest>.json     an artifact used in place, in a folder the user supplied
    artifacts/names/<name>/vN.json         one version: the full record of one production of an artifact

and, always on this machine: `artifacts/staging/` (being written), `artifacts/verified/` (size and time of files
whose hash was right), `artifacts/imports/` (hashes of user-supplied folders).

Content decides identity: the same type and bytes are one object, however often they are produced. Which step and
which inputs produced it is the version's record. Commit order is object, then version; a kill in between leaves an
object no one names, which the next production of the same content reuses.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from nemotron_steps.artifacts.backend import Backend, open_backend
from nemotron_steps.artifacts.files import (
    copy_tree,
    hash_tree,
    remove_tree,
    remove_unfinished,
    sha256_file,
    to_json_bytes,
    tree_files,
    write_atomic,
)
from nemotron_steps.artifacts.jsonable import plain
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
from nemotron_steps.artifacts.validators import sniff_type, validate
from nemotron_steps.errors import ArtifactError, StorageError, UnknownNameError

logger = logging.getLogger(__name__)

_OBJECTS = "artifacts/objects"
_REFERENCES = "artifacts/references"
_NAMES = "artifacts/names"


class ArtifactStore:
    """Artifacts of one home: a folder, or any fsspec URL (see backend.open_backend)."""

    def __init__(self, home: str | Path | Backend | None = None) -> None:
        self.backend: Backend = open_backend(home) if home is None or isinstance(home, str | Path) else home
        self._local = self.backend.scratch / "artifacts"

    # -- writing ---------------------------------------------------------------------------------------------

    @contextmanager
    def staging(self) -> Iterator[Path]:
        """A fresh folder to fill, on the file system artifacts are committed to; deleted on exit if still there.

        What killed processes left is cleaned on the way: a staging folder whose lock nobody holds is dead.
        """
        root = self._local / "staging"
        root.mkdir(parents=True, exist_ok=True)
        _clean_staging(root)
        folder, lock = _locked_folder(root)
        try:
            yield folder
        finally:
            remove_tree(folder)
            os.close(lock)

    def commit(
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
        """Validate, hash and publish a filled folder as the next version of `name`. The folder is moved away.

        Attributes read from the files win over `attributes`. If the newest version of the name is the same
        production (content, producer but for the run, inputs), that version is returned.

        Raises ArtifactError or DataError if the folder is not valid for its type (nothing is committed and the
        folder stays), StorageError if it cannot be written.
        """
        _require_name(name)
        # A commit killed while it wrote the manifest must not make the next one another artifact.
        remove_unfinished(staged / MANIFEST_NAME)
        found = validate(type_name, staged, supertypes)
        files = tuple(hash_tree(staged))
        artifact = Artifact(
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
        path = f"{_OBJECTS}/{artifact.digest}"
        corrupt = False
        if self.backend.read(f"{path}/{MANIFEST_NAME}") is not None:
            corrupt = bool(self._problems(artifact, self.backend.local_tree(path, files), full=True))
        write_atomic(staged / MANIFEST_NAME, to_json_bytes(artifact.to_json()))
        self.backend.commit_tree(staged, path, replace=corrupt)
        local = self.backend.local_tree(path, files)
        self._remember_verified(artifact.digest, local, files)
        return self._new_version(artifact.at(local))

    def add(
        self,
        path: Path,
        *,
        type_name: str | None = None,
        name: str | None = None,
        attributes: Mapping[str, Any] | None = None,
        supertypes: Sequence[str] = (),
    ) -> Artifact:
        """Copy a file or folder of the user's into the home as an artifact. The type is sniffed unless given."""
        type_name = type_name or self._require_type(path)
        # Checked where it lies, so that an error names the user's own file; the copy is checked again at commit.
        validate(type_name, path, supertypes)
        with self.staging() as folder:
            copy_tree(path, folder / "tree")
            return self.commit(
                folder / "tree",
                type_name,
                name=name or default_name(path),
                supertypes=supertypes,
                attributes=attributes,
                source=str(path.absolute()),
            )

    def reference(
        self, path: Path, *, type_name: str | None = None, supertypes: Sequence[str] = (), name: str | None = None
    ) -> Artifact:
        """Take a folder of the user's as an artifact in place, without copying it; a single file is copied.

        The folder is validated and hashed once, and again when a file's size or modification time changes; then
        it is another artifact.
        """
        if not path.exists():
            raise ArtifactError("there is nothing at this path", where=str(path))
        path = path.absolute()
        if path.is_file():
            return self.add(path, type_name=type_name, name=name, supertypes=supertypes)
        index = self._local / "imports" / f"{hashlib.sha256(str(path).encode()).hexdigest()[:32]}.json"
        stats = {f.relative_to(path).as_posix(): _stat(f) for f in tree_files(path, user_folder=True)}
        known = _read_json(index)
        if known and known["stats"] == stats and (type_name is None or known["type"] == type_name):
            type_name, found = str(known["type"]), dict(known["attributes"])
            files = [FileRecord(f, stats[f][0], digest) for f, digest in known["hashes"].items()]
        else:
            type_name = type_name or self._require_type(path)
            found = validate(type_name, path, supertypes)
            files = hash_tree(path, user_folder=True)
            record = {
                "path": str(path),
                "type": type_name,
                "stats": stats,
                "hashes": {f.path: f.sha256 for f in files},
                "attributes": plain(found),
            }
            write_atomic(index, to_json_bytes(record))
        artifact = Artifact(
            type=type_name,
            digest=tree_digest(type_name, files),
            path=path,
            attributes=plain(found),
            files=tuple(files),
            name=name or default_name(path),
            created=time.time(),
            source=str(path),
            location=str(path),
        )
        self.backend.write(f"{_REFERENCES}/{artifact.digest}.json", to_json_bytes(artifact.to_json()))
        self._remember_verified(artifact.digest, path, artifact.files)
        return self._new_version(artifact)

    # -- reading ---------------------------------------------------------------------------------------------

    def find(self, ref: str) -> Artifact:
        """The record of `NAME`, `NAME:vN`, `NAME:latest`, or a digest of at least 8 hex digits.

        Reads no file of the artifact; `path` may not exist yet (see `open`). UnknownNameError with near names.
        """
        if _looks_like_digest(ref):
            for digest in self.backend.names(_OBJECTS):
                if digest.startswith(ref):
                    return self.by_digest(digest)
            for entry in self.backend.names(_REFERENCES):
                if entry.startswith(ref):
                    return self.by_digest(entry.removesuffix(".json"))
        name, version = parse_ref(ref)
        versions = self.versions(name)
        if version == "latest" and versions:
            version = f"v{versions[-1]}"
        record = self.backend.read(f"{_NAMES}/{_quote(name)}/{version}.json") if versions else None
        if record is None:
            raise self._unknown(ref, name, versions)
        return self._from_record(record, f"{_NAMES}/{name}/{version}.json")

    def by_digest(self, digest: str) -> Artifact:
        """The first version of a digest. UnknownNameError if it is not in this home."""
        record = self.backend.read(f"{_OBJECTS}/{digest}/{MANIFEST_NAME}")
        if record is None:
            record = self.backend.read(f"{_REFERENCES}/{digest}.json")
        if record is None:
            raise UnknownNameError(
                "no artifact has this digest",
                where=self.backend.url,
                found=short_digest(digest),
                hints=("steps artifacts list",),
            )
        artifact = self._from_record(record, digest)
        # The object was written before its number was known; a kill in between leaves it without one.
        versions = self.list_artifacts(name=artifact.name)
        return next((version for version in versions if version.digest == digest), artifact)

    def open(self, ref: str | Artifact, *, full: bool = False) -> Artifact:
        """An artifact ready to be read: on this machine, with the bytes that were committed.

        Files whose size and modification time are those of the last successful check are trusted unless `full`.
        Raises ArtifactError naming the file, the expected and the found hash.
        """
        artifact = self.find(ref) if isinstance(ref, str) else ref
        artifact = artifact.at(self._local_path(artifact))
        problems = self._problems(artifact, artifact.path, full=full)
        if problems and not artifact.location and self.backend.drop_copy(f"{_OBJECTS}/{artifact.digest}"):
            # Perhaps only this machine's copy is bad.
            problems = self._problems(artifact, self._local_path(artifact), full=True)
        if problems:
            raise problems[0]
        return artifact

    def verify(self, ref: str | Artifact) -> list[ArtifactError]:
        """Hash every file of an artifact; every problem found, empty if it is whole."""
        artifact = self.find(ref) if isinstance(ref, str) else ref
        return self._problems(artifact, self._local_path(artifact), full=True)

    def exists(self, digest: str) -> bool:
        """Whether an artifact of this digest is committed (or referenced) here."""
        return (
            self.backend.read(f"{_OBJECTS}/{digest}/{MANIFEST_NAME}") is not None
            or self.backend.read(f"{_REFERENCES}/{digest}.json") is not None
        )

    def names(self) -> list[str]:
        """Every artifact name, sorted."""
        return sorted(_unquote(name) for name in self.backend.names(_NAMES))

    def versions(self, name: str) -> list[int]:
        """The versions of a name, oldest first; empty if there is no such name."""
        found = self.backend.names(f"{_NAMES}/{_quote(name)}")
        return sorted(int(v[1:-5]) for v in found if v.startswith("v") and v.endswith(".json") and v[1:-5].isdigit())

    def list_artifacts(self, *, type_name: str | None = None, name: str | None = None) -> list[Artifact]:
        """The record of every version, by name and version. `name` and `type_name` filter exactly."""
        artifacts = []
        for each in self.names() if name is None else [name]:
            for version in self.versions(each):
                record = self.backend.read(f"{_NAMES}/{_quote(each)}/v{version}.json")
                if record is None:
                    continue
                artifact = self._from_record(record, f"{each}:v{version}")
                if type_name is None or artifact.type == type_name:
                    artifacts.append(artifact)
        return artifacts

    # -- inside ----------------------------------------------------------------------------------------------

    def _new_version(self, artifact: Artifact) -> Artifact:
        while True:
            versions = self.versions(artifact.name)
            if versions:
                newest = self.find(f"{artifact.name}:v{versions[-1]}")
                if _same_production(newest, artifact):
                    return newest.at(artifact.path)
            numbered = replace(artifact, version=(versions[-1] if versions else 0) + 1)
            path = f"{_NAMES}/{_quote(artifact.name)}/v{numbered.version}.json"
            if self.backend.create(path, to_json_bytes(numbered.to_json())):
                return numbered

    def _from_record(self, data: bytes, where: str) -> Artifact:
        try:
            record = json.loads(data)
        except ValueError as error:
            raise ArtifactError("the artifact's record is not JSON", where=where, found=str(error)) from error
        artifact = Artifact.from_json(record, Path())
        if artifact.location:
            return artifact.at(Path(artifact.location))
        return artifact.at(self.backend.scratch / _OBJECTS / artifact.digest)

    def _local_path(self, artifact: Artifact) -> Path:
        if self.backend.read(f"{_OBJECTS}/{artifact.digest}/{MANIFEST_NAME}") is not None:
            return self.backend.local_tree(f"{_OBJECTS}/{artifact.digest}", artifact.files)
        if artifact.location and Path(artifact.location).is_dir():
            return Path(artifact.location)
        raise ArtifactError(
            f"the files of artifact '{artifact.ref}' are gone",
            where=artifact.location or f"{self.backend.url}/{_OBJECTS}/{artifact.digest}",
            expected="the folder it was registered from" if artifact.location else "a committed artifact",
            hints=(_recreate_hint(artifact),),
        )

    def _problems(self, artifact: Artifact, folder: Path, *, full: bool) -> list[ArtifactError]:
        trusted: dict[str, Any] = {} if full else (_read_json(self._verified_path(artifact.digest)) or {})
        trusted_files = trusted.get("files", {}) if trusted.get("folder") == str(folder) else {}
        problems: list[ArtifactError] = []
        checked = False
        for record in artifact.files:
            path = folder / record.path
            if not path.is_file():
                problems.append(_corrupt(artifact, path, f"sha256 {record.sha256}", "no file"))
                continue
            if trusted_files.get(record.path) == _stat(path):
                continue
            checked = True
            found = sha256_file(path)
            if found != record.sha256:
                problems.append(_corrupt(artifact, path, f"sha256 {record.sha256}", f"sha256 {found}"))
        if checked and not problems:
            self._remember_verified(artifact.digest, folder, artifact.files)
        return problems

    def _remember_verified(self, digest: str, folder: Path, files: Sequence[FileRecord]) -> None:
        record = {"folder": str(folder), "files": {f.path: _stat(folder / f.path) for f in files}}
        try:
            write_atomic(self._verified_path(digest), to_json_bytes(record))
        except StorageError as error:
            # Reading must work on a full or read-only disk; the files are then hashed again next time.
            logger.warning("could not record that %s is verified: %s", short_digest(digest), error.what)

    def _verified_path(self, digest: str) -> Path:
        return self._local / "verified" / f"{digest}.json"

    def _require_type(self, path: Path) -> str:
        if not path.exists():
            raise ArtifactError("there is nothing at this path", where=str(path))
        type_name = sniff_type(path)
        if type_name is None:
            raise ArtifactError(
                "the artifact type cannot be told from the files",
                where=str(path),
                expected="config.json and safetensors (checkpoint_hf), hf/ and weights/ (checkpoint_megatron), *.jsonl",
                hints=(f"steps artifacts add {path} --type <type>",),
            )
        return type_name

    def _unknown(self, ref: str, name: str, versions: Sequence[int]) -> UnknownNameError:
        import difflib

        if versions:
            return UnknownNameError(
                f"artifact '{name}' has no such version",
                expected=", ".join(f"v{v}" for v in versions[-8:]),
                found=ref,
                hints=(f"steps artifacts show {name}:latest",),
            )
        near = difflib.get_close_matches(name, self.names(), n=3, cutoff=0.5)
        return UnknownNameError(
            f"no artifact is called '{name}'",
            where=self.backend.url,
            expected=" or ".join(near) if near else None,
            found=ref,
            hints=(*(f"steps artifacts show {each}" for each in near), "steps artifacts list"),
        )


def _locked_folder(root: Path) -> tuple[Path, int]:
    """A new folder and the descriptor that holds its lock."""
    while True:
        folder = root / uuid.uuid4().hex
        folder.mkdir()
        # Another process may take it for dead until it is locked.
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if folder.exists():
            return folder, descriptor
        os.close(descriptor)


def _clean_staging(root: Path) -> None:
    for folder in root.iterdir():
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_tree(folder)
        except BlockingIOError:
            continue
        finally:
            os.close(descriptor)


def default_name(path: Path) -> str:
    """The name of a user-supplied artifact: `input/` and the file's or folder's name."""
    stem = path.stem if path.is_file() else path.name
    cleaned = "".join(c if c.isalnum() or c in "._-" else "-" for c in stem).strip(".-") or "unnamed"
    return f"input/{cleaned}"


def _require_name(name: str) -> None:
    if not is_artifact_name(name):
        raise ArtifactError("this cannot name an artifact", expected="letters, digits and ._-/", found=name)


def _same_production(a: Artifact, b: Artifact) -> bool:
    def identity(artifact: Artifact) -> tuple[Any, ...]:
        producer = artifact.producer
        made_by = (producer.step, producer.port, producer.cache_key) if producer else None
        inputs = tuple((edge.port, edge.digest) for edge in artifact.inputs)
        return artifact.digest, dict(artifact.attributes), made_by, inputs, artifact.location

    return identity(a) == identity(b)


def _corrupt(artifact: Artifact, path: Path, expected: str, found: str) -> ArtifactError:
    return ArtifactError(
        f"artifact '{artifact.ref}' is corrupt: a file is not what was committed",
        where=str(path),
        expected=expected,
        found=found,
        hints=(f"steps artifacts verify {artifact.ref}", _recreate_hint(artifact)),
    )


def _recreate_hint(artifact: Artifact) -> str:
    if artifact.producer is not None:
        step, run = artifact.producer.step, artifact.producer.run
        return f"steps run {step} --force   # makes it again; with the config of `steps status {run}`"
    return f"steps artifacts add {artifact.source or '<folder>'} --name {artifact.name or '<name>'}"


def _stat(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        data = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def _looks_like_digest(text: str) -> bool:
    return 8 <= len(text) <= 64 and all(c in "0123456789abcdef" for c in text)


def _quote(name: str) -> str:
    return name.replace("/", "~")


def _unquote(name: str) -> str:
    return name.replace("~", "/")
