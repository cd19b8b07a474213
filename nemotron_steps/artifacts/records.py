"""The records of a home as bytes: artifact.json and the version records, written with a checksum, read with distrust.

A field's shape is a type; one of the names below; a compiled pattern, for a text that it matches as a whole; a list of
one shape, for a list of such; a mapping of names to shapes, for exactly those fields (`Optional` ones may be absent);
a tuple of shapes, for any of them; or None. pydantic is slow to import.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemotron_steps.artifacts.files import require_relative, to_json_bytes
from nemotron_steps.artifacts.models import Artifact, Edge, FileRecord, Producer, is_artifact_name, tree_digest
from nemotron_steps.errors import ArtifactError

Shape = Any

DIGEST = re.compile(r"[0-9a-f]{64}")
TEXT = re.compile(r"(?s).{0,4096}")
ANY, NUMBER, COUNT, TIME = (object() for _ in range(4))
"""Anything JSON has (as a name in a mapping: all other fields); an int or float; an int that is not negative; Unix
seconds that a calendar can show."""
_KINDS: tuple[tuple[Any, Callable[[Any], bool]], ...] = (
    (ANY, lambda value: True),
    (NUMBER, lambda value: type(value) in (int, float)),
    (COUNT, lambda value: type(value) is int and value >= 0),
    (TIME, lambda value: type(value) in (int, float) and 0 <= value < 1e11),
    (None, lambda value: value is None),
)


@dataclass(frozen=True)
class Optional:
    """A field that may be absent."""

    shape: Shape


FORMAT = 2
"""Version of the layout. 1 had no checksum and is still read."""

CHECKSUM = "checksum"

_PRODUCER = {"step": TEXT, "port": TEXT, "run": TEXT, "step_version": TEXT, "cache_key": TEXT}
_ACCEPTED = {"by": TEXT, "at": TIME, "key": TEXT, "version": TEXT, "changed": [TEXT]}
_SINCE = {"config": Optional(TEXT), "accepted": Optional([_ACCEPTED]), "package": Optional(TEXT)}
_RECORD = {
    "format": COUNT,
    "type": TEXT,
    "digest": DIGEST,
    "name": TEXT,
    "version": COUNT,
    "attributes": dict,
    "files": [{"path": TEXT, "size": COUNT, "sha256": DIGEST}],
    "producer": (None, {**_PRODUCER, **_SINCE}),
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
        what, found = "this artifact was written by another version of nemotron_steps", f"format {version}"
        raise ArtifactError(what, where=where, expected=f"format {FORMAT}", found=found)
    require_shape(record, _RECORD, where)
    made = record["producer"]
    plain = ("type", "digest", "name", "version", "attributes", "source", "location")
    artifact = Artifact(
        **{name: record[name] for name in plain},
        path=Path(),
        files=tuple(FileRecord(require_relative(f["path"], where), f["size"], f["sha256"]) for f in record["files"]),
        producer=Producer(**{**made, "accepted": tuple(made.get("accepted", ()))}) if made else None,
        inputs=tuple(Edge(**edge) for edge in record["inputs"]),
        created=float(record["created"]),
    )
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
        what, hints = "an artifact's record contradicts itself", ("steps artifacts verify",)
        raise ArtifactError(what, where=where, expected=wrong[0], found=_short(wrong[1]), hints=hints)
    return artifact


def _checksum(data: Mapping[str, Any]) -> str:
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def _short(text: str) -> str:
    return text if len(text) <= 200 else text[:197] + "..."


def require_shape(value: Any, shape: Shape, where: str, hints: Sequence[str] = ("steps artifacts verify",)) -> None:
    """ArtifactError naming the field of the record at `where` that is not of its shape."""
    for at, found in _wrong(value, shape, ""):
        text = repr(found)
        raise ArtifactError(
            f"a record is malformed: {at or 'the whole of it'}",
            where=where,
            found=text if len(text) <= 120 else text[:117] + "...",
            hints=hints,
        )


def _wrong(value: Any, shape: Shape, at: str) -> Iterator[tuple[str, Any]]:
    """Fields that are not of their shape, and their values."""
    below = f"{at}." if at else ""
    if isinstance(shape, tuple):
        found = [[*_wrong(value, each, at)] for each in shape]
        yield from () if [] in found else found[0]
    elif isinstance(shape, list) and isinstance(value, list):
        for number, item in enumerate(value):
            yield from _wrong(item, shape[0], f"{at}[{number}]")
    elif isinstance(shape, Mapping) and isinstance(value, dict):
        for name, inner in shape.items():
            optional = isinstance(inner, Optional)
            if name in value:
                yield from _wrong(value[name], inner.shape if optional else inner, below + name)
            elif name is not ANY and not optional:
                yield below + name, "nothing"
        for name in [name for name in value if name not in shape]:
            if ANY in shape:
                yield from _wrong(value[name], shape[ANY], below + name)
            else:
                yield below + name, "an unknown field"
    elif isinstance(shape, re.Pattern):
        if not isinstance(value, str) or shape.fullmatch(value) is None:
            yield at, value
    elif not any(kind is shape and fits(value) for kind, fits in _KINDS) and type(value) is not shape:
        yield at, value
