"""What changed between two folders of safetensors: names, shapes, types, the largest difference. Without torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemotron_steps.artifacts.checkpoints import read_safetensors_header
from nemotron_steps.errors import UnsupportedError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_CHUNK = 1 << 22
"""Values that are read at a time."""
_NUMPY = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2",
    "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "|i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "|u1", "BOOL": "|u1",
}  # fmt: skip


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

    def to_dict(self) -> dict[str, Any]:
        """JSON-serialisable form."""
        return asdict(self)


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
