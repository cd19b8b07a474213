"""Second names of keys, by which published recipes and pages call them: moved to the first name before validation.

The second name is a field too, so that overrides may use it; it goes before the first, and is null afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError


def move(values: Any, name: str, key: str, kind: Any) -> Any:
    """A copy of a section's raw values with what `name` says at `key`, both dotted.

    Returned as they are where `name` says nothing, or nothing of its `kind`: its own field then says what is wrong.
    """
    given = get(values, name)
    if given is None:
        return values
    try:
        value = TypeAdapter(kind).validate_python(given)
    except ValidationError:
        return values
    return put(put(values, name, None), key, value)


def get(values: Any, key: str) -> Any:
    """What raw values say at a dotted key; None where they say nothing."""
    node = values
    for part in key.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


def put(values: Any, key: str, value: Any) -> Any:
    """A copy of raw values with `value` at a dotted key."""
    return _with(values, key.split("."), value)


def _with(values: Any, path: list[str], value: Any) -> Any:
    """A copy of nested mappings with `value` at a path; a place that is no mapping is left to validation."""
    if not path:
        return value
    node = {} if values is None else values
    if not isinstance(node, Mapping):
        return node
    return {**node, path[0]: _with(node.get(path[0]), path[1:], value)}
