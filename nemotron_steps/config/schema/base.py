"""The base of every config section: frozen, strict about unknown keys. And the mark of keys that change no result."""

from __future__ import annotations

from typing import Final

from pydantic import BaseModel, ConfigDict


class _Operational:
    def __repr__(self) -> str:
        return "OPERATIONAL"


OPERATIONAL: Final = _Operational()
"""Marks a key, or all keys of a section, that say where and how a step runs and not what it makes:
`Annotated[int, OPERATIONAL]`. They are no part of its cache key, so a step that was cut off, or ran out of memory, goes
on from its training checkpoint under other values of them. Only for what changes results by rounding at most."""


class Section(BaseModel):
    """A frozen group of keys. An unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), validate_default=True)
