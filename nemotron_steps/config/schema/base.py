"""The base of every config section: frozen, strict about unknown keys; and rules over several of its keys.

Also the mark of keys that change no result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Rule:
    """A combination of a section's keys that has no meaning, or would silently ignore one of them.

    Attributes:
        broken: whether the section's values are that combination.
        key: the key at fault, dotted, relative to the section.
        what: one sentence that says what is wrong, with whole key names.
        hints: overrides that mend it, keys relative to the section; several in one hint are separated by a space.
    """

    broken: bool
    key: str
    what: str
    hints: tuple[str, ...]


class BrokenRulesError(ValueError):
    """Rules that a section's values break. `config/validation.py` turns each into an error with place and hints."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        super().__init__("; ".join(rule.what for rule in rules))
        self.rules = tuple(rules)


def refuse(rules: Sequence[Rule]) -> None:
    """Raise BrokenRulesError if any rule is broken, with all that are. For model validators."""
    broken = [rule for rule in rules if rule.broken]
    if broken:
        raise BrokenRulesError(broken)
