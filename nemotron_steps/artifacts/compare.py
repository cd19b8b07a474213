"""What two artifacts of one type have and have not in common: attributes, files, rows, weights, inputs, lineage.

Rows of JSON Lines are compared whatever their order, tensors without torch.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
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
_SHOWN = 3
"""Examples of each kind."""
_IDS = ("id", "uuid", "task_id", "instance_id")
"""Keys that name a row."""
_CHUNK = 1 << 22
"""Values that are read at a time."""
_NUMPY = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2",
    "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "|i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "|u1", "BOOL": "|u1",
}  # fmt: skip


@dataclass(frozen=True)
class RowExample:
    """One row that differs. Lines count from 1, None where the row is only in the other file.

    `keys` are those whose values differ, of a changed row; `text` is the row's beginning, of any other.
    """

    kind: str
    line_a: int | None
    line_b: int | None
    keys: tuple[str, ...] = ()
    text: str = ""


@dataclass
class RowChanges:
    """Rows of two files. Two rows are the same if they hold the same values; of the same row an id, else its line, says
    that it changed."""

    same: int = 0
    added: int = 0
    removed: int = 0
    changed: int = 0
    examples: list[RowExample] = field(default_factory=list)


@dataclass(frozen=True)
class Tensor:
    """One tensor in a file: its first byte, type as safetensors calls it, and shape."""

    file: Path
    start: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass
class TensorChanges:
    """Tensors of two checkpoints.

    Attributes:
        same: how many have the same values.
        only_a, only_b: names that one of them lacks.
        reshaped: name → type and shape in each, where either differs.
        differing: name → largest absolute difference, largest first; infinite where one alone is NaN or infinite, None
            where the values cannot be compared (another shape, or 8-bit and smaller floats whose bytes differ).
    """

    same: int = 0
    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    reshaped: dict[str, tuple[str, str]] = field(default_factory=dict)
    differing: dict[str, float | None] = field(default_factory=dict)

    @property
    def largest(self) -> tuple[str, float] | None:
        """The tensor that differs most, and by how much."""
        return next(((name, value) for name, value in self.differing.items() if value is not None), None)


@dataclass
class Difference:
    """Two artifacts side by side.

    Attributes:
        attributes, inputs: name → value, or port → reference, in each, where they differ.
        ancestors: what only the first, and only the second, was made from in the end.
        files: path → sizes in bytes, where the contents differ or one lacks it.
        rows: JSON Lines file that both have → what changed.
        tensors: None where neither has safetensors weights, or all of them are in files that are the same.
    """

    a: Artifact
    b: Artifact
    attributes: dict[str, Pair] = field(default_factory=dict)
    inputs: dict[str, Pair] = field(default_factory=dict)
    ancestors: tuple[list[str], list[str]] = field(default_factory=lambda: ([], []))
    files: dict[str, Pair] = field(default_factory=dict)
    rows: dict[str, RowChanges] = field(default_factory=dict)
    tensors: TensorChanges | None = None

    @property
    def same(self) -> bool:
        """Whether they hold the same files and attributes, wherever they come from."""
        return self.a.digest == self.b.digest and not self.attributes

    def to_dict(self) -> dict[str, Any]:
        """JSON-serialisable form."""
        return {
            "a": {"ref": self.a.ref, "digest": self.a.digest, "type": self.a.type},
            "b": {"ref": self.b.ref, "digest": self.b.digest, "type": self.b.type},
            "same": self.same,
            "attributes": self.attributes,
            "inputs": self.inputs,
            "ancestors": {"only_a": self.ancestors[0], "only_b": self.ancestors[1]},
            "files": self.files,
            "rows": {path: asdict(changes) for path, changes in self.rows.items()},
            "tensors": None if self.tensors is None else asdict(self.tensors),
        }


def compare(store: ArtifactStore, ref_a: str, ref_b: str) -> Difference:
    """Compare two artifacts, each verified when it is opened.

    Raises ArtifactError if they are of different types, or one of them is broken.
    """
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
    if a.digest == b.digest:
        return found
    files_a, files_b = ({file.path: file for file in each.files} for each in (a, b))
    for path in sorted(files_a.keys() | files_b.keys()):
        one, other = files_a.get(path), files_b.get(path)
        if one is None or other is None or one.sha256 != other.sha256:
            found.files[path] = (one and one.size, other and other.size)
            if path.endswith(".jsonl") and one is not None and other is not None:
                found.rows[path] = compare_rows(a.path / path, b.path / path)
    if any(path.endswith(".safetensors") for path in found.files):
        found.tensors = compare_tensors(tensors_of(a.path), tensors_of(b.path))
    return found


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Every value of nested mappings under its dotted key."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            found.update(flat(value, f"{prefix}{name}."))
        else:
            found[f"{prefix}{name}"] = value
    return found


def _differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Pair]:
    return {name: (a.get(name), b.get(name)) for name in sorted({**a, **b}) if a.get(name) != b.get(name)}


def config_changes(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Pair]:
    """Dotted config key → value in each, where they differ."""
    return _differing(flat(a), flat(b))


def compare_rows(a: Path, b: Path) -> RowChanges:
    """What changed from `a` to `b`. Holds a digest of each row, and the rows that differ one at a time."""
    rows_a, rows_b = list(_digests(a)), list(_digests(b))
    common = Counter(rows_a) & Counter(rows_b)
    left_a, left_b = _left(rows_a, common), _left(rows_b, common)
    changes = RowChanges(same=common.total())
    theirs = {_name(row, line): line for line, row in _read(b, left_b)}
    taken: set[int] = set()
    pairs: dict[int, int] = {}
    for line, row in _read(a, left_a):
        match = theirs.get(_name(row, line))
        if match is None or match in taken:
            changes.removed += 1
            _show(changes, RowExample("removed", line, None, text=_text(row)))
        else:
            taken.add(match)
            changes.changed += 1
            if changes.changed <= _SHOWN:
                pairs[line] = match
    after = dict(_read(b, set(pairs.values())))
    for line, row in _read(a, set(pairs)):
        _show(changes, RowExample("changed", line, pairs[line], keys=_changed_keys(row, after[pairs[line]])))
    for line, row in _read(b, left_b - taken):
        changes.added += 1
        _show(changes, RowExample("added", None, line, text=_text(row)))
    return changes


def _digests(path: Path) -> Iterator[bytes]:
    """16 bytes for each row, the same for the same values. Blank lines are rows of nothing."""
    with path.open("rb") as file:
        for raw in file:
            row = _parsed(raw)
            text = raw if isinstance(row, bytes) else json.dumps(row, sort_keys=True).encode()
            yield hashlib.blake2b(text, digest_size=16).digest()


def _left(rows: list[bytes], common: Counter[bytes]) -> set[int]:
    """Numbers of the lines that the other file has no row for."""
    still = common.copy()
    left = set()
    for line, digest in enumerate(rows, start=1):
        if still[digest] > 0:
            still[digest] -= 1
        else:
            left.add(line)
    return left


def _read(path: Path, lines: set[int]) -> Iterator[tuple[int, Any]]:
    if not lines:
        return
    with path.open("rb") as file:
        for line, raw in enumerate(file, start=1):
            if line in lines:
                yield line, _parsed(raw)


def _parsed(raw: bytes) -> Any:
    """A row's values; the bytes of one that is no JSON."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return raw.rstrip(b"\n")


def _name(row: Any, line: int) -> tuple[str, Any]:
    found = next((key for key in _IDS if isinstance(row, dict) and isinstance(row.get(key), str | int)), None)
    return ("line", line) if found is None else (found, row[found])


def _changed_keys(a: Any, b: Any) -> tuple[str, ...]:
    if not isinstance(a, dict) or not isinstance(b, dict):
        return ()
    return tuple(key for key in {**a, **b} if key not in a or key not in b or a[key] != b[key])


def _show(changes: RowChanges, example: RowExample) -> None:
    if sum(each.kind == example.kind for each in changes.examples) < _SHOWN:
        changes.examples.append(example)


def _text(row: Any) -> str:
    text = row.decode("utf-8", "replace") if isinstance(row, bytes) else json.dumps(row, ensure_ascii=False)
    return text if len(text) <= 120 else f"{text[:119]}…"


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Every tensor in the safetensors files of a folder, by name; in a folder below it, `FOLDER/NAME`.

    Raises ArtifactError for a broken file, UnsupportedError where numpy is not installed.
    """
    if find_spec("numpy") is None:
        raise UnsupportedError(
            "weights are compared with numpy, which is not installed",
            where=str(folder),
            hints=("pip install 'nemotron-steps[engine]'",),
        )
    found: dict[str, Tensor] = {}
    for file in sorted(folder.rglob("*.safetensors")):
        header = read_safetensors_header(file)
        with file.open("rb") as opened:
            begin = 8 + int.from_bytes(opened.read(8), "little")
        below = file.parent.relative_to(folder).as_posix()
        for name, entry in header.items():
            start, stop = entry["data_offsets"]
            key = name if below == "." else f"{below}/{name}"
            found[key] = Tensor(file, begin + start, stop - start, entry["dtype"], tuple(entry["shape"]))
    return found


def compare_tensors(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> TensorChanges:
    """What changed from `a` to `b`, read a few megabytes at a time."""
    changes = TensorChanges(only_a=sorted(a.keys() - b.keys()), only_b=sorted(b.keys() - a.keys()))
    differing: dict[str, float | None] = {}
    for name in sorted(a.keys() & b.keys()):
        one, other = a[name], b[name]
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            changes.reshaped[name] = (str(one), str(other))
        if one.shape != other.shape:
            differing[name] = None
            continue
        difference = _largest_difference(one, other)
        if difference == 0:
            changes.same += 1
        else:
            differing[name] = difference
    order = sorted(differing.items(), key=lambda item: -math.inf if item[1] is None else item[1], reverse=True)
    changes.differing = dict(order)
    return changes


def _largest_difference(a: Tensor, b: Tensor) -> float | None:
    import numpy as np

    if a.dtype not in _NUMPY or b.dtype not in _NUMPY:
        alike = a.dtype == b.dtype and all(x == y for x, y in zip(_chunks(a, 1), _chunks(b, 1), strict=True))
        return 0.0 if alike else None
    largest = 0.0
    for raw_a, raw_b in zip(_chunks(a, _size(a)), _chunks(b, _size(b)), strict=True):
        if a.dtype == b.dtype and raw_a == raw_b:
            continue
        one, other = _values(raw_a, a.dtype), _values(raw_b, b.dtype)
        with np.errstate(invalid="ignore", over="ignore"):
            apart = np.abs(one - other)
        # Equal infinities, and NaN on both sides, are no difference; what is left of NaN is one.
        apart[(one == other) | (np.isnan(one) & np.isnan(other))] = 0.0
        apart[np.isnan(apart)] = math.inf
        largest = max(largest, float(apart.max(initial=0.0)))
    return largest


def _size(tensor: Tensor) -> int:
    import numpy as np

    return np.dtype(_NUMPY[tensor.dtype]).itemsize


def _chunks(tensor: Tensor, itemsize: int) -> Iterator[bytes]:
    with tensor.file.open("rb") as file:
        file.seek(tensor.start)
        left = tensor.nbytes
        while left > 0:
            raw = file.read(min(left, _CHUNK * itemsize))
            left -= len(raw)
            yield raw


def _values(raw: bytes, dtype: str) -> NDArray[Any]:
    import numpy as np

    values = np.frombuffer(raw, _NUMPY[dtype])
    if dtype == "BF16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    # A double does not tell large 64-bit integers apart.
    return values.astype(np.longdouble if dtype in ("I64", "U64") else np.float64)
