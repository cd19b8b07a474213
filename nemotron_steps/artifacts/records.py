"""The records of a home as bytes: artifact.json and the version records, written with a checksum, read with distrust.

A field's shape is a type; one of the names below; a compiled pattern, for a text that it matches as a whole; a list of
one shape, for a list of such; a mapping of names to shapes, for exactly those fields (`Optional` ones may be absent);
`Values` of a shape; a tuple of shapes, for any of them; or None. pydantic is slow to import.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemotron_steps.artifacts.confinement import require_relative
from nemotron_steps.artifacts.files import to_json_bytes
from nemotron_steps.artifacts.models import Artifact, Edge, FileRecord, Producer, is_artifact_name, tree_digest
from nemotron_steps.errors import ArtifactError

Shape = Any

DIGEST = re.compile(r"[0-9a-f]{64}")
TEXT = re.compile(r"(?s).{0,4096}")
ANY = object()
"""Anything JSON has. As a name in a mapping: other fields are welcome."""
NUMBER = object()
"""An int or float."""
COUNT = object()
"""An int that is not negative."""
TIME = object()
"""Unix seconds that a calendar can show."""


@dataclass(frozen=True)
class Optional:
    """A field that may be absent."""

    shape: Shape


@dataclass(frozen=True)
class Values:
    """A mapping of whatever names to values of one shape."""

    shape: Shape


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
    """The inverse of artifact_bytes, with an empty `path`. ArtifactError for anything but an intact record."""
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
    made = record["producer"]
    artifact = Artifact(
        type=record["type"],
        digest=record["digest"],
        path=Path(),
        attributes=record["attributes"],
        files=tuple(FileRecord(require_relative(f["path"], where), f["size"], f["sha256"]) for f in record["files"]),
        name=record["name"],
        version=record["version"],
        producer=Producer(**{**made, "accepted": tuple(made.get("accepted", ()))}) if made else None,
        inputs=tuple(Edge(**edge) for edge in record["inputs"]),
        created=float(record["created"]),
        source=record["source"],
        location=record["location"],
    )
    _check(artifact, where)
    return artifact


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


def require_shape(value: Any, shape: Shape, where: str, hints: Sequence[str] = ("steps artifacts verify",)) -> None:
    """ArtifactError naming the field of the record at `where` that is not of its shape."""
    wrong = _wrong(value, shape, "")
    if wrong is not None:
        text = repr(wrong[1])
        raise ArtifactError(
            f"a record is malformed: {wrong[0] or 'the whole of it'}",
            where=where,
            found=text if len(text) <= 120 else text[:117] + "...",
            hints=hints,
        )


def _wrong(value: Any, shape: Shape, at: str) -> tuple[str, Any] | None:
    """The first field that is not of its shape, and its value."""
    if isinstance(shape, tuple):
        found = [_wrong(value, each, at) for each in shape]
        return None if None in found else found[0]
    if isinstance(shape, Mapping):
        if not isinstance(value, dict):
            return at, value
        for name, inner in shape.items():
            below, optional = _below(at, str(name)), isinstance(inner, Optional)
            if name is ANY or (optional and name not in value):
                continue
            if name not in value:
                return below, "nothing"
            if wrong := _wrong(value[name], inner.shape if optional else inner, below):
                return wrong
        unknown = next((name for name in value if name not in shape and ANY not in shape), None)
        return None if unknown is None else (_below(at, unknown), "an unknown field")
    if isinstance(shape, Values):
        if not isinstance(value, dict):
            return at, value
        return next((w for k, item in value.items() if (w := _wrong(item, shape.shape, _below(at, k)))), None)
    if isinstance(shape, list):
        if not isinstance(value, list):
            return at, value
        return next((w for n, item in enumerate(value) if (w := _wrong(item, shape[0], f"{at}[{n}]"))), None)
    if shape is ANY:
        fits = True
    elif shape is NUMBER:
        fits = type(value) in (int, float)
    elif shape is COUNT:
        fits = type(value) is int and value >= 0
    elif isinstance(shape, re.Pattern):
        fits = isinstance(value, str) and shape.fullmatch(value) is not None
    elif shape is TIME:
        fits = type(value) in (int, float) and 0 <= value < 1e11
    else:
        fits = value is None if shape is None else type(value) is shape
    return None if fits else (at, value)


def _below(at: str, name: str) -> str:
    return f"{at}.{name}" if at else name
