"""Whether what a home holds is what was committed: records against records, and every byte against the records.

Files are hashed where the home has them. The cheap check before an artifact is read is the store's own.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nemotron_steps.artifacts.backend import Backend
from nemotron_steps.artifacts.files import hash_tree, is_digest
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

Hashed = dict[tuple[str, str], list[FileRecord]]
"""Place and digest of a folder → its files, hashed once for all versions of the same content."""


@dataclass(frozen=True)
class Verified:
    """One thing that was looked at: an artifact's version, or a record that no name leads to."""

    ref: str
    digest: str
    """Empty where the record could not be read."""
    problems: tuple[ArtifactError, ...]


def verify_home(store: ArtifactStore) -> Iterator[Verified]:
    """Look at every record and every file of a home's artifacts, also at those that no name leads to."""
    backend, hashed = store.backend, Hashed()
    named: set[str] = set()
    for ref, record in store.records():
        if isinstance(record, ArtifactError):
            yield Verified(ref, "", (record,))
            continue
        named.add(record.digest)
        yield Verified(ref, record.digest, tuple(problems(store, record, hashed)))
    for name in backend.names(OBJECTS):
        if name in named or name.endswith(_LEFTOVERS):
            continue
        path, found = f"{OBJECTS}/{name}", list[ArtifactError]()
        try:
            if not is_digest(name):
                raise _stray(backend, path)
            if backend.read(f"{path}/{MANIFEST_NAME}") is not None:  # else an upload that was cut short
                found = problems(store, _own_record(backend, name), hashed)
        except ArtifactError as error:
            found = [error]
        if found:
            yield Verified(path, name if is_digest(name) else "", tuple(found))
    for name in backend.names(REFERENCES):
        path, digest = f"{REFERENCES}/{name}", name.removesuffix(".json")
        try:
            if not is_digest(digest) or digest == name:
                raise _stray(backend, path)
            store.reference_record(digest)
        except ArtifactError as error:
            yield Verified(path, "", (error,))


def problems(store: ArtifactStore, artifact: Artifact, hashed: Hashed | None = None) -> list[ArtifactError]:
    """Everything about an artifact that is not as its version's record says. `hashed` is looked in, and filled."""
    backend, digest, hashed = store.backend, artifact.digest, {} if hashed is None else hashed
    path, place, found = f"{OBJECTS}/{digest}", artifact.location, list[ArtifactError]()
    if backend.read(f"{path}/{MANIFEST_NAME}") is not None:
        place = backend.where(path)
        try:
            _own_record(backend, digest)
        except ArtifactError as error:
            found = [error]
    elif not place or not Path(place).is_dir():
        return [gone(artifact, backend)]
    in_place = place == artifact.location
    try:
        if in_place:
            require_supplied(store, artifact)
        if (place, digest) not in hashed:
            hashed[place, digest] = hash_tree(Path(place), user_folder=True) if in_place else backend.stored_files(path)
        return [*found, *differences(artifact, hashed[place, digest], place)]
    except ArtifactError as error:
        return [*found, error]
    except OSError as error:
        return [*found, ArtifactError("a file cannot be read", where=place, found=str(error))]


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
        where=artifact.location or backend.where(f"{OBJECTS}/{artifact.digest}"),
        expected="the folder it was registered from" if artifact.location else "a committed artifact",
        hints=(recreate_hint(artifact),),
    )


def place_of(store: ArtifactStore, artifact: Artifact) -> Path:
    """The folder that an artifact would be read from; nothing of it is read. ArtifactError as `require_supplied`."""
    backend = store.backend
    if not artifact.location or backend.read(f"{OBJECTS}/{artifact.digest}/{MANIFEST_NAME}") is not None:
        return backend.scratch / OBJECTS / artifact.digest
    require_supplied(store, artifact)
    return Path(artifact.location)


def require_supplied(store: ArtifactStore, artifact: Artifact) -> None:
    """ArtifactError for an artifact in a folder outside the home that this user never supplied."""
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


def _own_record(backend: Backend, digest: str) -> Artifact:
    """The artifact.json of an object. ArtifactError if it is broken, or another's."""
    where = backend.where(f"{OBJECTS}/{digest}/{MANIFEST_NAME}")
    record = parse_artifact(backend.read(f"{OBJECTS}/{digest}/{MANIFEST_NAME}") or b"", where)
    if record.digest != digest or record.location or record.version:
        raise ArtifactError(
            "the record is another artifact's",
            where=where,
            expected=f"the record of {short_digest(digest)}",
            found=f"the record of {record.ref}",
            hints=(recreate_hint(record),),
        )
    return record


def _stray(backend: Backend, path: str) -> ArtifactError:
    return ArtifactError("this is not part of any artifact", where=backend.where(path), expected="a sha256 in hex")
