"""The records of a home as bytes: artifact.json and the version records, written with a checksum, read with distrust.

What is read has every field checked for its type and form, its paths confined to the artifact's folder, its digest
recomputed from type and files, and its checksum recomputed from the rest. The checksum finds what went wrong by
itself, swapped disks and half-edited files; against somebody who can write to the home it only keeps him from
changing what the digest does not cover by accident. The digest and the confinement do not depend on it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemotron_steps.artifacts.confinement import require_relative
from nemotron_steps.artifacts.files import to_json_bytes
from nemotron_steps.artifacts.models import (
    Artifact,
    Edge,
    FileRecord,
    Producer,
    is_artifact_name,
    tree_digest,
)
from nemotron_steps.artifacts.shapes import COUNT, DIGEST, TEXT, TIME, Optional, require_shape
from nemotron_steps.errors import ArtifactError

FORMAT = 2
"""Version of the layout. 1 had no checksum and is still read."""

CHECKSUM = "checksum"

_PRODUCER = {"step": TEXT, "port": TEXT, "run": TEXT, "step_version": TEXT, "cache_key": TEXT}
_ACCEPTED = {"by": TEXT, "at": TIME, "key": TEXT, "version": TEXT, "changed": [TEXT]}
_RECORD = {
    "format": COUNT,
    "type": TEXT,
    "digest": DIGEST,
    "name": TEXT,
    "version": COUNT,
    "attributes": dict,
    "files": [{"path": TEXT, "size": COUNT, "sha256": DIGEST}],
    "producer": (None, {**_PRODUCER, "config": Optional(TEXT), "accepted": Optional([_ACCEPTED])}),
    "inputs": [{"port": TEXT, "digest": DIGEST, "ref": TEXT}],
    "created": TIME,
    "source": TEXT,
    "location": TEXT,
}


def sealed(data: Mapping[str, Any]) -> bytes:
    """A record's bytes, with a checksum over its other fields."""
    return to_json_bytes({**data, CHECKSUM: _checksum(data)})


def opened(data: bytes, where: str) -> dict[str, Any]:
    """The fields of a sealed record, without the checksum. ArtifactError if it is not one, or was changed."""
    record = json_object(data, where)
    found = record.pop(CHECKSUM, None)
    if found != _checksum(record):
        raise ArtifactError(
            "a record was changed after it was written",
            where=where,
            expected=f"checksum {_checksum(record)}",
            found=f"checksum {found}",
            hints=("steps artifacts verify",),
        )
    return record


def json_object(data: bytes, where: str) -> dict[str, Any]:
    """A JSON object from bytes. ArtifactError if it is anything else."""
    try:
        value = json.loads(data)
        # Half of a surrogate pair, written as an escape, cannot be written or printed again.
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise ArtifactError("a record is not JSON", where=where, found=_short(str(error))) from error
    if not isinstance(value, dict):
        raise ArtifactError("a record is not a JSON object", where=where, found=type(value).__name__)
    return value


def artifact_bytes(artifact: Artifact) -> bytes:
    """The content of artifact.json, or of a version record."""
    return sealed({"format": FORMAT, **artifact.to_json()})


def parse_artifact(data: bytes, where: str) -> Artifact:
    """The inverse of artifact_bytes, with an empty `path`. ArtifactError for anything but an intact record.

    Args:
        where: the record's address, for the error.
    """
    record = json_object(data, where)
    version = record.get("format")
    if version == FORMAT:
        record = opened(data, where)
    elif version != 1 or CHECKSUM in record:
        raise ArtifactError(
            "this artifact was written by another version of nemotron_steps",
            where=where,
            expected=f"format {FORMAT}",
            found=f"format {version}",
        )
    require_shape(record, _RECORD, where)
    artifact = Artifact(
        type=record["type"],
        digest=record["digest"],
        path=Path(),
        attributes=record["attributes"],
        files=tuple(FileRecord(require_relative(f["path"], where), f["size"], f["sha256"]) for f in record["files"]),
        name=record["name"],
        version=record["version"],
        producer=_producer(record["producer"]) if record["producer"] else None,
        inputs=tuple(Edge(**edge) for edge in record["inputs"]),
        created=float(record["created"]),
        source=record["source"],
        location=record["location"],
    )
    _check(artifact, where)
    return artifact


def _producer(record: Mapping[str, Any]) -> Producer:
    return Producer(**{**record, "accepted": tuple(record.get("accepted", ()))})


def _check(artifact: Artifact, where: str) -> None:
    paths = [record.path for record in artifact.files]
    computed = tree_digest(artifact.type, artifact.files)
    wrong: tuple[str, str] | None = None
    if artifact.digest != computed:
        wrong = (f"digest {computed}, by its type and files", f"digest {artifact.digest}")
    elif len(set(paths)) != len(paths):
        wrong = ("each file once", next(path for path in paths if paths.count(path) > 1))
    elif not is_artifact_name(artifact.name):
        wrong = ("an artifact's name", repr(artifact.name))
    elif artifact.location and not Path(artifact.location).is_absolute():
        wrong = ("an absolute path as the location", repr(artifact.location))
    if wrong is not None:
        raise ArtifactError(
            "an artifact's record contradicts itself",
            where=where,
            expected=wrong[0],
            found=_short(wrong[1]),
            hints=("steps artifacts verify",),
        )


def _checksum(data: Mapping[str, Any]) -> str:
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def _short(text: str) -> str:
    return text if len(text) <= 200 else text[:197] + "..."
