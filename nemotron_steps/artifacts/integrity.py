"""Whether what a home holds is what was committed: records against records, and every byte against the records.

Files are hashed where the home has them. The cheap check before an artifact is read is the store's own.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from nemotron_steps.artifacts.backend import Backend
from nemotron_steps.artifacts.confinement import is_digest
from nemotron_steps.artifacts.files import hash_tree
from nemotron_steps.artifacts.models import MANIFEST_NAME, Artifact, FileRecord, short_digest
from nemotron_steps.artifacts.records import parse_artifact
from nemotron_steps.errors import ArtifactError

if TYPE_CHECKING:
    from nemotron_steps.artifacts.store import ArtifactStore

OBJECTS = "artifacts/objects"
REFERENCES = "artifacts/references"
NAMES = "artifacts/names"

_LEFTOVERS = (".corrupt", ".partial")
"""Ends of the names of folders that a kill can leave beside objects."""


@dataclass(frozen=True)
class Verified:
    """One thing that was looked at: an artifact's version, or a record that no name leads to."""

    ref: str
    digest: str
    """Empty where the record could not be read."""
    problems: tuple[ArtifactError, ...]


def verify_home(store: ArtifactStore) -> Iterator[Verified]:
    """Look at every record and every file of a home's artifacts, also at those that no name leads to, each file
    once."""
    contents = Contents(store)
    named: set[str] = set()
    for ref, record in store.records():
        if isinstance(record, ArtifactError):
            yield Verified(ref, "", (record,))
            continue
        named.add(record.digest)
        yield Verified(ref, record.digest, tuple(contents.problems(record)))
    backend = store.backend
    for name in backend.names(OBJECTS):
        if name in named or name.endswith(_LEFTOVERS):
            continue
        problems = object_problems(backend, name) if is_digest(name) else [_stray(backend, f"{OBJECTS}/{name}")]
        if problems:
            yield Verified(f"{OBJECTS}/{name}", name if is_digest(name) else "", tuple(problems))
    for name in backend.names(REFERENCES):
        path, digest = f"{REFERENCES}/{name}", name.removesuffix(".json")
        try:
            if not is_digest(digest) or digest == name:
                raise _stray(backend, path)
            store.reference_record(digest)
        except ArtifactError as error:
            yield Verified(path, "", (error,))


class Contents:
    """The files behind digests, hashed once each."""

    def __init__(self, store: ArtifactStore) -> None:
        self._store = store
        self._found: dict[tuple[str, str], list[FileRecord] | ArtifactError] = {}
        self._record_problem = cache(partial(_record_problem, store.backend))

    def problems(self, artifact: Artifact) -> list[ArtifactError]:
        """Everything about an artifact that is not as its version's record says."""
        backend, digest = self._store.backend, artifact.digest
        path, problems = f"{OBJECTS}/{digest}", []
        read = partial(backend.stored_files, path)
        place = _place(backend, path)
        if backend.read(f"{path}/{MANIFEST_NAME}") is not None:
            problems += [problem for problem in [self._record_problem(digest)] if problem is not None]
        elif not artifact.location:
            return [gone(artifact, backend)]
        else:
            place = artifact.location
            read = partial(hash_tree, Path(place), user_folder=True)
            try:
                require_supplied(self._store, artifact)
            except ArtifactError as error:
                return [error]
        if (place, digest) not in self._found:
            try:
                self._found[place, digest] = read()
            except ArtifactError as error:
                self._found[place, digest] = error
            except OSError as error:
                self._found[place, digest] = ArtifactError("a file cannot be read", where=place, found=str(error))
        found = self._found[place, digest]
        return [*problems, *([found] if isinstance(found, ArtifactError) else differences(artifact, found, place))]


def object_problems(backend: Backend, digest: str) -> list[ArtifactError]:
    """Everything about a committed folder that is not as its own artifact.json says."""
    path = f"{OBJECTS}/{digest}"
    data = backend.read(f"{path}/{MANIFEST_NAME}")
    if data is None:  # an upload that was cut short: it does not exist yet
        return []
    broken = _record_problem(backend, digest)
    if broken is not None:
        return [broken]
    artifact = parse_artifact(data, _place(backend, f"{path}/{MANIFEST_NAME}"))
    try:
        return differences(artifact, backend.stored_files(path), _place(backend, path))
    except ArtifactError as error:
        return [error]


def differences(artifact: Artifact, found: Sequence[FileRecord], place: str) -> list[ArtifactError]:
    """Files of the folder or URL `place` that are missing, too many or changed. `found`: as they are."""
    wrong: list[tuple[str, str, str]] = []
    there = {record.path: record for record in found}
    for record in artifact.files:
        other = there.pop(record.path, None)
        if other is None:
            wrong.append((record.path, f"sha256 {record.sha256}", "no file"))
        elif other.sha256 != record.sha256:
            wrong.append((record.path, f"sha256 {record.sha256}", f"sha256 {other.sha256}"))
        elif other.size != record.size:
            wrong.append((record.path, f"{record.size} bytes", f"{other.size} bytes"))
    wrong += [(path, "no such file", "a file that was not committed") for path in there]
    return [
        ArtifactError(
            f"artifact '{artifact.ref}' is corrupt: a file is not what was committed",
            where=f"{place}/{path}",
            expected=expected,
            found=actual,
            hints=(recreate_hint(artifact), f"steps artifacts verify {artifact.ref}"),
        )
        for path, expected, actual in wrong
    ]


def gone(artifact: Artifact, backend: Backend) -> ArtifactError:
    """The error for an artifact whose folder is not there."""
    return ArtifactError(
        f"the files of artifact '{artifact.ref}' are gone",
        where=artifact.location or _place(backend, f"{OBJECTS}/{artifact.digest}"),
        expected="the folder it was registered from" if artifact.location else "a committed artifact",
        hints=(recreate_hint(artifact),),
    )


def place_of(store: ArtifactStore, artifact: Artifact) -> Path:
    """The folder that an artifact would be read from; nothing of it is read. ArtifactError as `require_supplied`."""
    backend = store.backend
    if not artifact.location or backend.read(f"{OBJECTS}/{artifact.digest}/{MANIFEST_NAME}") is not None:
        return backend.scratch / OBJECTS / artifact.digest
    require_supplied(store, artifact, must_exist=False)
    return Path(artifact.location)


def require_supplied(store: ArtifactStore, artifact: Artifact, *, must_exist: bool = True) -> None:
    """ArtifactError for an artifact in a folder outside the home that is gone, or that this user never supplied."""
    if must_exist and not Path(artifact.location).is_dir():
        raise gone(artifact, store.backend)
    if not store.imports.allows(artifact.location):
        raise ArtifactError(
            f"artifact '{artifact.ref}' lies in a folder outside the home that you never gave as an input",
            where=artifact.location,
            expected="an artifact of the home, or a folder that this user supplied from this machine",
            hints=(
                f"--input PORT={shlex.quote(artifact.location)}   # if you trust it",
                f"steps artifacts add {shlex.quote(artifact.location)}",
            ),
        )


def recreate_hint(artifact: Artifact) -> str:
    """A command that makes an artifact again."""
    if artifact.producer is not None:
        step, run = shlex.quote(artifact.producer.step), shlex.quote(artifact.producer.run)
        return f"steps run {step} --force   # makes it again; with the config of `steps status {run}`"
    source = shlex.quote(artifact.source) if artifact.source else "<folder>"
    return f"steps artifacts add {source} --name {artifact.name or '<name>'}"


def _record_problem(backend: Backend, digest: str) -> ArtifactError | None:
    """What is wrong with the artifact.json of an object, None if nothing is."""
    where = _place(backend, f"{OBJECTS}/{digest}/{MANIFEST_NAME}")
    try:
        record = parse_artifact(backend.read(f"{OBJECTS}/{digest}/{MANIFEST_NAME}") or b"", where)
    except ArtifactError as error:
        return error
    if record.digest != digest or record.location or record.version:
        return ArtifactError(
            "the record is another artifact's",
            where=where,
            expected=f"the record of {short_digest(digest)}",
            found=f"the record of {record.ref}",
            hints=(recreate_hint(record),),
        )
    return None


def _stray(backend: Backend, path: str) -> ArtifactError:
    return ArtifactError("this is not part of any artifact", where=_place(backend, path), expected="a sha256 in hex")


def _place(backend: Backend, path: str) -> str:
    return f"{backend.url.rstrip('/')}/{path}"
