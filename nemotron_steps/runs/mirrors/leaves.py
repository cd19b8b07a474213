"""Tables as the flat names that MLflow's and TensorBoard's stores take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def leaves(value: Any, path: str, separator: str) -> Iterator[tuple[str, Any]]:
    """(joined keys, value) of everything below a mapping, however deep; `path` is the name of the value itself."""
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from leaves(item, f"{path}{separator}{name}" if path else str(name), separator)
    elif path:
        yield path, value
