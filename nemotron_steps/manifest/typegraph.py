"""The artifact types: which is usable as which (`is_a`), and how one becomes another (`convert_to`).

`is_a` is transitive and goes one way. A conversion available to a type is its own `convert_to`, or, when it declares
none, that of its parents; after a conversion the artifact has exactly the target type.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property


@dataclass(frozen=True)
class Conversion:
    """One hop: `step_id` turns an artifact usable as `source` into one of type `target`."""

    source: str
    target: str
    step_id: str


@dataclass(frozen=True)
class ArtifactType:
    """An artifact type. `convert_to` is None when the type says nothing, and empty when it forbids conversion."""

    name: str
    description: str = ""
    is_a: tuple[str, ...] = ()
    convert_to: Mapping[str, str] | None = None
    attributes: Mapping[str, str] = field(default_factory=dict)
    validator: str | None = None
    """`module:function` that checks a folder; None where a parent's, or nothing, does."""
    where: str = ""
    """file:line of its definition; empty for a type that is only used, never declared."""


class TypeGraph:
    """Immutable set of artifact types. Types that are used but not declared relate to nothing but themselves."""

    def __init__(self, types: Iterable[ArtifactType] = ()) -> None:
        self.types: Mapping[str, ArtifactType] = {t.name: t for t in types}
        self.ancestors = cache(self._ancestors)
        self.conversions = cache(self._conversions)
        self.leading_to = cache(self._leading_to)

    @property
    def validators(self) -> dict[str, str]:
        """Type → `module:function`, of the types that declare one."""
        return {name: each.validator for name, each in self.types.items() if each.validator is not None}

    def __contains__(self, name: object) -> bool:
        return name in self.types

    def _ancestors(self, name: str) -> tuple[str, ...]:
        """The type itself, then everything it is, nearest first (ties in declared order)."""
        order = [name]
        for each in order:
            declared = self.types.get(each)
            order += [parent for parent in (declared.is_a if declared is not None else ()) if parent not in order]
        return tuple(order)

    def is_a(self, name: str, parent: str) -> bool:
        """Whether an artifact of type `name` can be used where `parent` is asked for."""
        return name == parent or parent in self.ancestors(name)

    def descendants(self, name: str) -> tuple[str, ...]:
        """Declared types usable as `name`, sorted, without `name` itself."""
        return tuple(sorted(other for other in self.types if other != name and self.is_a(other, name)))

    def _conversions(self, name: str) -> tuple[Conversion, ...]:
        """Hops open to a type, sorted: those of the nearest types at or above it that declare some, one per line of
        descent."""
        found: dict[tuple[str, str], Conversion] = {}
        queue = [name]
        for current in queue:
            declared = self.types.get(current)
            if declared is None:
                continue
            if declared.convert_to is None:
                queue += [parent for parent in declared.is_a if parent not in queue]
                continue
            for hop in declared.convert_to.items():
                found.setdefault(hop, Conversion(current, *hop))
        return tuple(found[key] for key in sorted(found))

    def path(self, found: str, wanted: str) -> tuple[Conversion, ...] | None:
        """Fewest conversions that make an artifact of type `found` usable as `wanted`; None when nothing leads there.

        Among equally short chains the first in (target, step id) order at every hop."""
        leading = self.leading_to(wanted)
        if found not in leading:
            return None
        hops: list[Conversion] = []
        for left in reversed(range(leading[found])):
            hops.append(next(hop for hop in self.conversions(found) if leading.get(hop.target) == left))
            found = hops[-1].target
        return tuple(hops)

    def _leading_to(self, wanted: str) -> Mapping[str, int]:
        """Every type that can be used as, or converted into, `wanted` → how few conversions that takes."""
        below, before = self._reversed
        found, hops = dict.fromkeys((wanted, *below.get(wanted, ())), 0), 0
        level = list(found)
        while level:
            hops += 1
            level = [name for target in level for name in before.get(target, ()) if name not in found]
            found |= dict.fromkeys(level, hops)
        return found

    @cached_property
    def _reversed(self) -> tuple[Mapping[str, list[str]], Mapping[str, list[str]]]:
        """Type → the types below it, and type → those that convert to it."""
        below, before = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
        for name in self.types:
            for ancestor in self.ancestors(name)[1:]:
                below[ancestor].append(name)
            for hop in self.conversions(name):
                before[hop.target].append(name)
        return below, before

    def without(self, dropped: Iterable[Conversion]) -> TypeGraph:
        """The same graph without some conversions (a converter step that is missing or unusable)."""
        types = {**self.types}
        for hop in dropped:
            left = {**(types[hop.source].convert_to or {})}
            left.pop(hop.target, None)
            types[hop.source] = replace(types[hop.source], convert_to=left)
        return TypeGraph(types.values())
