"""The artifact types: which is usable as which (`is_a`), and how one becomes another (`convert_to`).

Plain data and graph walks, standard library only. `is_a` is transitive and goes one way. A conversion available to a
type is its own `convert_to`, or, when it declares none, that of its parents; after a conversion the artifact has
exactly the target type.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property


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
        self._ancestors: dict[str, tuple[str, ...]] = {}
        self._paths: dict[tuple[str, str], tuple[Conversion, ...] | None] = {}
        self._conversions: dict[str, tuple[Conversion, ...]] = {}
        self._leading: dict[str, Mapping[str, int]] = {}

    @property
    def validators(self) -> dict[str, str]:
        """Type → `module:function`, of the types that declare one."""
        return {name: each.validator for name, each in self.types.items() if each.validator is not None}

    def __contains__(self, name: object) -> bool:
        return name in self.types

    def ancestors(self, name: str) -> tuple[str, ...]:
        """The type itself, then everything it is, nearest first (ties in declared order)."""
        known = self._ancestors.get(name)
        if known is None:
            order, queue = [name], deque([name])
            while queue:
                declared = self.types.get(queue.popleft())
                for parent in declared.is_a if declared is not None else ():
                    if parent not in order:
                        order.append(parent)
                        queue.append(parent)
            known = self._ancestors[name] = tuple(order)
        return known

    def is_a(self, name: str, parent: str) -> bool:
        """Whether an artifact of type `name` can be used where `parent` is asked for."""
        return name == parent or parent in self.ancestors(name)

    def descendants(self, name: str) -> tuple[str, ...]:
        """Declared types usable as `name`, sorted, without `name` itself."""
        return tuple(sorted(other for other in self.types if other != name and self.is_a(other, name)))

    def conversions(self, name: str) -> tuple[Conversion, ...]:
        """Hops open to an artifact of type `name`, sorted by target and step."""
        known = self._conversions.get(name)
        if known is None:
            found: dict[tuple[str, str], Conversion] = {}
            for source in self._declaring(name):
                for target, step_id in (self.types[source].convert_to or {}).items():
                    found.setdefault((target, step_id), Conversion(source, target, step_id))
            known = self._conversions[name] = tuple(found[key] for key in sorted(found))
        return known

    def _declaring(self, name: str) -> list[str]:
        """Nearest types at or above `name` that declare convert_to, one per line of descent."""
        found: list[str] = []
        queue, seen = deque([name]), {name}
        while queue:
            current = queue.popleft()
            declared = self.types.get(current)
            if declared is None:
                continue
            if declared.convert_to is not None:
                found.append(current)
                continue
            for parent in declared.is_a:
                if parent not in seen:
                    seen.add(parent)
                    queue.append(parent)
        return found

    def path(self, found: str, wanted: str) -> tuple[Conversion, ...] | None:
        """Fewest conversions that make an artifact of type `found` usable as `wanted`.

        () when it already is; None when nothing leads there. Among equally short chains the first in
        (target, step id) order at every hop, so the answer depends on the graph alone.
        """
        key = (found, wanted)
        if key not in self._paths:
            self._paths[key] = self._search(found, wanted)
        return self._paths[key]

    def _search(self, found: str, wanted: str) -> tuple[Conversion, ...] | None:
        queue: deque[tuple[str, tuple[Conversion, ...]]] = deque([(found, ())])
        seen = {found}
        while queue:
            current, hops = queue.popleft()
            if self.is_a(current, wanted):
                return hops
            for hop in self.conversions(current):
                if hop.target not in seen:
                    seen.add(hop.target)
                    queue.append((hop.target, (*hops, hop)))
        return None

    def leading_to(self, wanted: str) -> Mapping[str, int]:
        """Every type that can be used as, or converted into, `wanted` → how few conversions that takes.

        The same answers as `path`, found from the other end: looking for a source among many artifacts asks this
        once instead of asking `path` for each.
        """
        known = self._leading.get(wanted)
        if known is None:
            found = {wanted: 0}
            level = [wanted]
            for name in level:  # grows: everything that is a `wanted`
                for child in self._children.get(name, ()):
                    if child not in found:
                        found[child] = 0
                        level.append(child)
            hops = 0
            while level:
                hops += 1
                level = self._one_conversion_before(level, found, hops)
            known = self._leading[wanted] = found
        return known

    def _one_conversion_before(self, level: Iterable[str], found: dict[str, int], hops: int) -> list[str]:
        """Types, not in `found` yet, with a conversion to a type of `level`; adds them to `found`."""
        before: list[str] = []
        for target in level:
            queue = [source for source in self._converting_to.get(target, ()) if source not in found]
            while queue:
                name = queue.pop()
                if name not in found:
                    found[name] = hops
                    before.append(name)
                # Subtypes inherit conversions until one declares its own.
                queue += [
                    child
                    for child in self._children.get(name, ())
                    if child not in found and self.types[child].convert_to is None
                ]
        return before

    @cached_property
    def _children(self) -> Mapping[str, list[str]]:
        children: dict[str, list[str]] = {}
        for name, artifact_type in self.types.items():
            for parent in artifact_type.is_a:
                children.setdefault(parent, []).append(name)
        return children

    @cached_property
    def _converting_to(self) -> Mapping[str, list[str]]:
        sources: dict[str, list[str]] = {}
        for name, artifact_type in self.types.items():
            for target in artifact_type.convert_to or {}:
                sources.setdefault(target, []).append(name)
        return sources

    def without(self, dropped: Iterable[Conversion]) -> TypeGraph:
        """The same graph without some conversions (a converter step that is missing or unusable)."""
        gone = {(hop.source, hop.target) for hop in dropped}
        return TypeGraph(
            replace(
                t,
                convert_to=None
                if t.convert_to is None
                else {target: step for target, step in t.convert_to.items() if (t.name, target) not in gone},
            )
            for t in self.types.values()
        )


def find_cycles(parents: Mapping[str, Iterable[str]]) -> tuple[tuple[str, ...], ...]:
    """Every is_a cycle, as the types on it, first repeated at the end. Empty when there is none."""
    cycles: list[tuple[str, ...]] = []
    state: dict[str, int] = {}  # 1: on the current path, 2: done
    for root in sorted(parents):
        if root in state:
            continue
        path: list[str] = []
        stack: list[tuple[str, bool]] = [(root, False)]
        while stack:
            name, leaving = stack.pop()
            if leaving:
                state[name] = 2
                path.pop()
                continue
            if state.get(name) == 1:
                cycles.append((*path[path.index(name) :], name))
                continue
            if state.get(name) == 2:
                continue
            state[name] = 1
            path.append(name)
            stack.append((name, True))
            stack.extend((parent, False) for parent in reversed(list(parents.get(name, ()))))
    return tuple(cycles)
