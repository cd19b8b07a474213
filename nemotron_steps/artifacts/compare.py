"""What two artifacts of one type have and have not in common: attributes, files, rows, weights, inputs, lineage."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemotron_steps.artifacts.checkpoints import read_safetensors_header
from nemotron_steps.artifacts.lineage import lineage
from nemotron_steps.artifacts.models import Artifact, short_digest
from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.errors import ArtifactError, UnsupportedError

if TYPE_CHECKING:
    from numpy.typing import NDArray

Pair = tuple[Any, Any]
"""A value in the first artifact and in the second; None where one lacks it."""
_CHUNK = 1 << 22
"""Values that are read at a time."""
_NUMPY = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2",
    "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "|i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "|u1", "BOOL": "|u1",
}  # fmt: skip


@dataclass
class RowChanges:
    """Rows of two files, whatever their order: how many hold the same values, and how many each has alone."""

    same: int
    removed: int
    added: int


@dataclass
class TensorChanges:
    """Tensors of two checkpoints: how many hold the same values, and names of those that do not."""

    same: int = 0
    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    reshaped: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Type and shape in each, where either differs."""
    differing: dict[str, float | None] = field(default_factory=dict)
    """Largest absolute difference, largest first; infinite where one alone is NaN or infinite, None where the values
    cannot be compared (another shape, or 8-bit and smaller floats whose bytes differ)."""


@dataclass
class Difference:
    """Two artifacts side by side: what differs, by name, port or path."""

    a: Artifact
    b: Artifact
    attributes: dict[str, Pair] = field(default_factory=dict)
    inputs: dict[str, Pair] = field(default_factory=dict)
    ancestors: tuple[list[str], list[str]] = field(default_factory=lambda: ([], []))
    """What only the first, and only the second, was made from in the end."""
    files: dict[str, Pair] = field(default_factory=dict)
    """Sizes in bytes, where the contents differ or one lacks it."""
    rows: dict[str, RowChanges] = field(default_factory=dict)
    tensors: TensorChanges | None = None
    """None where neither has safetensors weights, or all of them are in files that are the same."""

    @property
    def same(self) -> bool:
        """Whether they hold the same files and attributes, wherever they come from."""
        return self.a.digest == self.b.digest and not self.attributes

    def to_dict(self) -> dict[str, Any]:
        """JSON-serialisable form."""
        return {
            **vars(self),
            "a": {"ref": self.a.ref, "digest": self.a.digest, "type": self.a.type},
            "b": {"ref": self.b.ref, "digest": self.b.digest, "type": self.b.type},
            "same": self.same,
            "ancestors": {"only_a": self.ancestors[0], "only_b": self.ancestors[1]},
            "rows": {path: asdict(changes) for path, changes in self.rows.items()},
            "tensors": None if self.tensors is None else asdict(self.tensors),
        }


def compare(store: ArtifactStore, ref_a: str, ref_b: str) -> Difference:
    """Compare two artifacts, each verified when it is opened. ArtifactError if they are of different types."""
    first, second = store.find(ref_a), store.find(ref_b)
    if first.type != second.type:
        raise ArtifactError(
            "two artifacts of different types have nothing to compare",
            where=f"{first.ref} and {second.ref}",
            expected=f"two of one type, as {first.type}",
            found=f"{first.type} and {second.type}",
            hints=(f"steps artifacts list --type {first.type}",),
        )
    a, b = store.open(first), store.open(second)
    found = Difference(a, b, _differing(a.attributes, b.attributes))
    edges_a, edges_b = ({edge.port: edge for edge in each.inputs} for each in (a, b))
    for port in sorted(edges_a.keys() | edges_b.keys()):
        edges = (edges_a.get(port), edges_b.get(port))
        if edges[0] is None or edges[1] is None or edges[0].digest != edges[1].digest:
            names = [None if each is None else each.ref or short_digest(each.digest) for each in edges]
            found.inputs[port] = (names[0], names[1])
    above_a, above_b = ({link.parent for link in lineage(store, each).ancestors} for each in (a, b))
    found.ancestors = (sorted(above_a - above_b), sorted(above_b - above_a))
    files_a, files_b = ({file.path: file for file in each.files} for each in (a, b))
    for path in sorted(files_a.keys() | files_b.keys()):
        one, other = files_a.get(path), files_b.get(path)
        if one is not None and other is not None and one.sha256 == other.sha256:
            continue
        found.files[path] = (one and one.size, other and other.size)
        if path.endswith(".jsonl") and one is not None and other is not None:
            rows_a, rows_b = _rows(a.path / path), _rows(b.path / path)
            counts = [rows_a & rows_b, rows_a - rows_b, rows_b - rows_a]
            found.rows[path] = RowChanges(*(count.total() for count in counts))
    if any(path.endswith(".safetensors") for path in found.files):
        found.tensors = compare_tensors(a.path, b.path)
    return found


def _differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Pair]:
    return {name: (a.get(name), b.get(name)) for name in sorted({**a, **b}) if a.get(name) != b.get(name)}


def config_changes(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Pair]:
    """Dotted config key → value in each, where they differ."""
    return _differing(_flat(a), _flat(b))


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        is_group = isinstance(value, Mapping) and value
        found |= _flat(value, f"{prefix}{name}.") if is_group else {f"{prefix}{name}": value}
    return found


def _rows(path: Path) -> Counter[bytes]:
    """A digest of each row, the same for the same values in another order of keys."""
    rows: Counter[bytes] = Counter()
    with path.open("rb") as file:
        for raw in file:
            try:
                raw = json.dumps(json.loads(raw), sort_keys=True).encode()
            except (ValueError, RecursionError):
                raw = raw.rstrip(b"\n")
            rows[hashlib.blake2b(raw, digest_size=16).digest()] += 1
    return rows


def compare_tensors(a: Path, b: Path) -> TensorChanges:
    """What changed in the safetensors files of two folders, read a few megabytes at a time, without torch."""
    if find_spec("numpy") is None:
        raise UnsupportedError(
            "weights are compared with numpy, which is not installed",
            where=str(a),
            hints=("pip install 'nemotron-steps[engine]'",),
        )
    tensors_a, tensors_b = _tensors(a), _tensors(b)
    names_a, names_b = tensors_a.keys(), tensors_b.keys()
    changes = TensorChanges(only_a=sorted(names_a - names_b), only_b=sorted(names_b - names_a))
    differing: dict[str, float | None] = {}
    for name in sorted(names_a & names_b):
        (one, file_one), (other, file_other) = tensors_a[name], tensors_b[name]
        if (one["dtype"], one["shape"]) != (other["dtype"], other["shape"]):
            shown = [f"{each['dtype']} {each['shape']}" for each in (one, other)]
            changes.reshaped[name] = (shown[0], shown[1])
        differing[name] = None
        if one["shape"] == other["shape"]:
            differing[name] = _largest_difference(one, file_one, other, file_other)
        if differing[name] == 0:
            changes.same += 1
            del differing[name]
    order = sorted(differing.items(), key=lambda item: -math.inf if item[1] is None else item[1], reverse=True)
    changes.differing = dict(order)
    return changes


def _tensors(folder: Path) -> dict[str, tuple[dict[str, Any], Path]]:
    """Every tensor in the safetensors files of a folder, by name; in a folder below it, `FOLDER/NAME`."""
    found = {}
    for file in sorted(folder.rglob("*.safetensors")):
        below = (file.parent / "x").relative_to(folder).as_posix()[:-1]
        found.update({below + name: (entry, file) for name, entry in read_safetensors_header(file).items()})
    return found


def _largest_difference(one: dict[str, Any], file_one: Path, other: dict[str, Any], file_other: Path) -> float | None:
    import numpy as np

    types = (one["dtype"], other["dtype"])
    raw_one, raw_other = _raw(one, file_one), _raw(other, file_other)
    largest = 0.0
    for start in range(0, len(raw_one), _CHUNK):
        a, b = raw_one[start : start + _CHUNK], raw_other[start : start + _CHUNK]
        if types[0] == types[1] and a.tobytes() == b.tobytes():
            continue
        if not _NUMPY.keys() >= {*types}:
            return None
        one_values, other_values = _values(a, types[0]), _values(b, types[1])
        with np.errstate(invalid="ignore", over="ignore"):
            apart = np.abs(one_values - other_values)
        # Equal infinities, and NaN on both sides, are no difference; what is left of NaN is one.
        apart[(one_values == other_values) | (np.isnan(one_values) & np.isnan(other_values))] = 0.0
        apart[np.isnan(apart)] = math.inf
        largest = max(largest, float(apart.max(initial=0.0)))
    return largest


def _raw(entry: dict[str, Any], file: Path) -> NDArray[Any]:
    import numpy as np

    with file.open("rb") as opened:
        begin = 8 + int.from_bytes(opened.read(8), "little")
    start, stop = entry["data_offsets"]
    kind = np.dtype(_NUMPY.get(entry["dtype"], "|u1"))
    if start == stop:
        return np.empty(0, kind)
    return np.memmap(file, kind, "r", begin + start, ((stop - start) // kind.itemsize,))


def _values(raw: NDArray[Any], dtype: str) -> NDArray[Any]:
    import numpy as np

    if dtype == "BF16":
        return (raw.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    # A double does not tell large 64-bit integers apart.
    return raw.astype(np.longdouble if dtype in ("I64", "U64") else np.float64)
