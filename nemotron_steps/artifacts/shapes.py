"""Whether what was read from JSON has the fields it must have, and nothing else.

pydantic would say more, and takes longer to import than most commands run.

A shape is a type; one of the names below; a compiled pattern, for a text that it matches as a whole; a list of one
shape, for a list of such; a mapping of names to shapes, for exactly those fields (`Optional` ones may be absent);
`Values` of a shape; a tuple of shapes, for any of them; or None.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
        return _wrong_fields(value, shape, at)
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


def _wrong_fields(value: Any, shape: Mapping[str, Shape], at: str) -> tuple[str, Any] | None:
    if not isinstance(value, dict):
        return at, value
    for name, inner in shape.items():
        if name is ANY:
            continue
        if name not in value:
            if isinstance(inner, Optional):
                continue
            return _below(at, name), "nothing"
        wrong = _wrong(value[name], inner.shape if isinstance(inner, Optional) else inner, _below(at, name))
        if wrong is not None:
            return wrong
    unknown = next((name for name in value if name not in shape and ANY not in shape), None)
    return None if unknown is None else (_below(at, unknown), "an unknown field")


def _below(at: str, name: str) -> str:
    return f"{at}.{name}" if at else name
