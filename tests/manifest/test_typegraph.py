"""is_a and convert_to against brute force on random small graphs."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemotron_steps.manifest.typegraph import ArtifactType, Conversion, TypeGraph, find_cycle

NAMES = "abcdefg"


@st.composite
def graphs(draw: st.DrawFn) -> TypeGraph:
    """Acyclic is_a over up to seven types; some declare conversions, some forbid them, some inherit."""
    names = NAMES[: draw(st.integers(1, len(NAMES)))]
    types = []
    for position, name in enumerate(names):
        parents = draw(st.lists(st.sampled_from(names[:position]), max_size=2, unique=True)) if position else []
        targets = draw(st.none() | st.lists(st.sampled_from([*names, "undeclared"]), max_size=2, unique=True))
        convert = None if targets is None else {t: draw(st.sampled_from(["c/1", "c/2"])) for t in targets if t != name}
        types.append(ArtifactType(name, is_a=tuple(parents), convert_to=convert))
    return TypeGraph(types)


def is_a_slowly(graph: TypeGraph, name: str, parent: str) -> bool:
    declared = graph.types.get(name)
    return name == parent or any(is_a_slowly(graph, p, parent) for p in (declared.is_a if declared else ()))


def targets_slowly(graph: TypeGraph, name: str) -> set[str]:
    declared = graph.types.get(name)
    if declared is None:
        return set()
    if declared.convert_to is not None:
        return set(declared.convert_to)
    return {target for parent in declared.is_a for target in targets_slowly(graph, parent)}


def fewest_slowly(graph: TypeGraph, found: str, wanted: str) -> int | None:
    reached = {found}
    for hops in range(len(graph.types) + 2):
        if any(is_a_slowly(graph, name, wanted) for name in reached):
            return hops
        reached |= {target for name in reached for target in targets_slowly(graph, name)}
    return None


ANY = st.sampled_from([*NAMES, "undeclared"])


@given(graphs(), ANY, ANY)
def test_is_a_is_transitive_and_one_way(graph: TypeGraph, one: str, other: str) -> None:
    assert graph.is_a(one, other) == is_a_slowly(graph, one, other)
    if one != other:
        assert not (graph.is_a(one, other) and graph.is_a(other, one))


@given(graphs(), ANY, ANY)
def test_path_is_a_shortest_valid_chain(graph: TypeGraph, found: str, wanted: str) -> None:
    path = graph.path(found, wanted)
    fewest = fewest_slowly(graph, found, wanted)
    assert (None if path is None else len(path)) == fewest
    current = found
    for hop in path or ():
        assert hop in graph.conversions(current)
        assert is_a_slowly(graph, current, hop.source)
        assert graph.types[hop.source].convert_to is not None
        assert (graph.types[hop.source].convert_to or {})[hop.target] == hop.step_id
        current = hop.target
    if path is not None:
        assert is_a_slowly(graph, current, wanted)


def test_own_conversions_replace_inherited_ones() -> None:
    graph = TypeGraph(
        [
            ArtifactType("hf", convert_to={"dist": "c"}),
            ArtifactType("dist"),
            ArtifactType("judge", is_a=("hf",), convert_to={}),
            ArtifactType("student", is_a=("hf",)),
        ]
    )
    assert graph.path("judge", "dist") is None
    assert graph.path("student", "dist") == (Conversion("hf", "dist", "c"),)
    assert graph.leading_to("dist") == {"dist": 0, "hf": 1, "student": 1}
    assert graph.is_a("judge", "hf")


@pytest.mark.timeout(30)
def test_types_that_are_each_others_parents_end_no_search() -> None:
    """The registry reports them and goes on with the rest."""
    graph = TypeGraph(ArtifactType(name, is_a=(parent,)) for name, parent in ("ab", "bc", "cb"))
    assert graph.conversions("a") == () and graph.path("a", "d") is None and graph.path("a", "c") == ()


@given(st.dictionaries(st.sampled_from(NAMES), st.lists(st.sampled_from(NAMES), max_size=3), max_size=6))
def test_a_cycle_is_found_exactly_when_there_is_one(parents: dict[str, list[str]]) -> None:
    def reachable(name: str, seen: frozenset[str]) -> set[str]:
        found: set[str] = set()
        for parent in parents.get(name, ()):
            found.add(parent)
            if parent not in seen:
                found |= reachable(parent, seen | {parent})
        return found

    cycle = find_cycle(parents)
    assert bool(cycle) == any(name in reachable(name, frozenset()) for name in parents)
    assert cycle[:1] == cycle[-1:]
    assert all(child in parents and parent in parents[child] for child, parent in pairwise(cycle))
