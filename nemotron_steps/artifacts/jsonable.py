"""Any value as strict JSON, for records, attributes and metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_NOT_FINITE = ("nan", "inf", "-inf")


def as_float(value: Any) -> float | None:
    """A number of a record; also one that is not finite, which `plain` wrote as text. None for anything else."""
    known = value in _NOT_FINITE if isinstance(value, str) else isinstance(value, int | float)
    return float(value) if known and not isinstance(value, bool) else None


def plain(value: Any) -> Any:
    """`value` as strict JSON in UTF-8: NaN and infinities become strings, numpy and torch scalars become numbers.

    Half of a surrogate pair, which a server's JSON may hold as an escape, becomes a question mark.
    """
    if isinstance(value, bool | int) or value is None:
        return value
    if isinstance(value, str):
        return value if value.isascii() else value.encode(errors="replace").decode()
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {plain(str(key)): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "size", None) is not None:
        shape = getattr(value, "shape", ())
        return plain(item()) if math.prod(shape) == 1 else plain(value.tolist())
    return plain(str(value))
