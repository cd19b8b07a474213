"""The base of every config section: frozen, strict about unknown keys, with rules over several of its keys.

Also the marks on keys: OPERATIONAL for those that change no result, OnlyIf for those that need another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from types import UnionType
from typing import Any, Final, Self, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, model_validator


class _Operational:
    def __repr__(self) -> str:
        return "OPERATIONAL"


OPERATIONAL: Final = _Operational()
"""Marks a key, or all keys of a section, that say where and how a step runs and not what it makes:
`Annotated[int, OPERATIONAL]`. They are no part of its cache key, so a step that was cut off, or ran out of memory, goes
on from its training checkpoint under other values of them. Only for what changes results by rounding at most."""


@dataclass(frozen=True)
class OnlyIf:
    """Marks a key that has no effect, or contradicts another, unless that has certain values:
    `Annotated[float, OnlyIf("use_dynamic_sampling")]`. It is refused if it differs from its default otherwise; of a
    section, every key in it is.

    Attributes:
        key: dotted, of the nearest section around the marked key that has it. Without one the mark says nothing.
        values: that `key` may have; empty: any but null, false, zero and empty ones.
    """

    key: str
    values: tuple[Any, ...]

    def __init__(self, key: str, *values: Any) -> None:
        object.__setattr__(self, "key", key)
        object.__setattr__(self, "values", values)

    def holds(self, section: Section) -> bool:
        """Whether a section that has `key` lets the marked key have any value."""
        value: Any = section
        for part in self.key.split("."):
            value = getattr(value, part, None)
        return value in self.values if self.values else bool(value)

    def text(self, prefix: str = "") -> str:
        """The condition in words; `prefix` goes before its key."""
        allowed = " or ".join(map(written, self.values))
        return f"{prefix}{self.key}={allowed}" if self.values else f"{prefix}{self.key} to be set"


@dataclass(frozen=True)
class Rule:
    """A combination of a section's keys that has no meaning, or would silently ignore one of them.

    Attributes:
        key: the key at fault, dotted, relative to the section.
        what: one sentence that says what is wrong, with whole key names; empty where `needs` says it.
        hint: overrides after which the rule holds, keys relative to the section, separated by spaces; may be empty.
        needs: what an OnlyIf of the key asks for.
    """

    key: str
    what: str
    hint: str = ""
    needs: OnlyIf | None = None

    def sentence(self, prefix: str = "") -> str:
        """What is wrong; `prefix` goes before relative keys."""
        return self.what if self.needs is None else f"{prefix}{self.key} needs {self.needs.text(prefix)}"


class BrokenRulesError(ValueError):
    """Rules that a section's values break. `config/validation.py` turns each into an error with place and hint."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        super().__init__("; ".join(rule.sentence() for rule in rules))
        self.rules = tuple(rules)


class Section(BaseModel):
    """A frozen group of keys. An unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), validate_default=True)

    def _broken_rules(self) -> Iterable[Rule]:
        """What of this section's values, and of those of the sections within, has no meaning together."""
        return ()

    @model_validator(mode="after")
    def _has_a_meaning(self) -> Self:
        unmet: dict[str, Rule] = {}  # of a key's marks the first that does not hold
        for key, mark in _marks(type(self))[0]:
            for changed, default in () if mark.holds(self) else changed_keys(self, key):
                unmet.setdefault(changed, Rule(changed, "", to_default(changed, default), mark))
        if broken := [*unmet.values(), *self._broken_rules()]:
            raise BrokenRulesError(broken)
        return self


def changed_keys(values: Section, key: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, default) of what differs from its default: of a section, or at one dotted key of it."""
    *sections, name = key.split(".")
    before = "".join(f"{part}." for part in sections)
    for section in sections:
        values = getattr(values, section)
    for field in [name] if name else type(values).model_fields:
        value = getattr(values, field)
        default = type(values).model_fields[field].get_default(call_default_factory=True)  # type: ignore[call-arg]
        if isinstance(value, Section) and isinstance(default, Section):
            yield from ((f"{before}{field}.{below}", plain) for below, plain in changed_keys(value))
        elif value != default:
            yield f"{before}{field}", default


def to_default(key: str, default: Any) -> str:
    """The override that gives a key its default."""
    return f"~{key}" if isinstance(default, Mapping) else f"{key}={written(default)}"


def written(value: Any) -> str:
    """A value as an override has it."""
    if isinstance(value, tuple):
        return f"[{','.join(map(written, value))}]"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return str(value) or "''"


@cache
def _marks(model: type[Section]) -> tuple[list[tuple[str, OnlyIf]], list[tuple[str, OnlyIf]]]:
    """(dotted key, its mark) of a section: marks whose conditions it has itself, and those of sections around it."""
    found: list[tuple[str, OnlyIf]] = []
    for name, info in model.model_fields.items():
        found += [(name, mark) for mark in info.metadata if isinstance(mark, OnlyIf)]
        below = [each for each in members(info.annotation) if isinstance(each, type) and issubclass(each, Section)]
        found += [(f"{name}.{key}", mark) for section in below for key, mark in _marks(section)[1]]
    own = [(key, mark) for key, mark in found if mark.key.partition(".")[0] in model.model_fields]
    return own, [each for each in found if each not in own]


def members(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, Annotated stripped; a plain annotation is its own only member."""
    if hasattr(annotation, "__metadata__"):
        return members(annotation.__origin__)
    if get_origin(annotation) in (Union, UnionType):
        return tuple(chain.from_iterable(map(members, get_args(annotation))))
    return (annotation,)


def move_alias(values: Any, name: str, key: str, kind: Any) -> Any:
    """A copy of a section's raw values with what `name` says at `key`, both dotted: an alias, by which published
    recipes call it, that goes before it and is null afterwards. As they are where it says nothing, or nothing of its
    `kind`: its own field then says what is wrong."""
    given = get_raw(values, name)
    if given is None:
        return values
    try:
        value = TypeAdapter(kind).validate_python(given)
    except ValidationError:
        return values
    return put_raw(put_raw(values, name, None), key, value)


def get_raw(values: Any, key: str) -> Any:
    """What raw values say at a dotted key; None where they say nothing."""
    for part in key.split("."):
        values = values.get(part) if isinstance(values, Mapping) else None
    return values


def put_raw(values: Any, key: str, value: Any) -> Any:
    """A copy of raw values with `value` at a dotted key; a place that is not a mapping is left to validation."""
    if not key:
        return value
    values = {} if values is None else values
    if not isinstance(values, Mapping):
        return values
    name, _, below = key.partition(".")
    return {**values, name: put_raw(values.get(name), below, value)}
