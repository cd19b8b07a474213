"""What two artifacts of one type have and have not in common: attributes, files, inputs."""

from collections.abc import Mapping
from typing import Any

from nemotron_steps.artifacts.models import short_digest
from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.errors import ArtifactError

Values = tuple[Any, ...]
"""A value in the first artifact, or whatever is compared, and in the next; None where one lacks it."""


def compare(store: ArtifactStore, ref_a: str, ref_b: str) -> dict[str, Any]:
    """Two artifacts, each verified when it is opened, and what differs, by name, port or path (files' sizes in bytes).
    ArtifactError if they are of different types."""
    first, second = store.find(ref_a), store.find(ref_b)
    if first.type != second.type:
        raise ArtifactError(
            "two artifacts of different types have nothing to compare",
            where=f"{first.ref} and {second.ref}",
            expected=f"two of one type, as {first.type}",
            found=f"{first.type} and {second.type}",
            hints=(f"steps artifacts list --type {first.type}",),
        )
    a, b = store.open(first), store.open(second)
    attributes, inputs = differing(a.attributes, b.attributes), dict[str, Values]()
    edges_a, edges_b = ({edge.port: edge for edge in each.inputs} for each in (a, b))
    for port in sorted(edges_a.keys() | edges_b.keys()):
        edges = (edges_a.get(port), edges_b.get(port))
        if edges[0] is None or edges[1] is None or edges[0].digest != edges[1].digest:
            names = [None if each is None else each.ref or short_digest(each.digest) for each in edges]
            inputs[port] = (names[0], names[1])
    files_a, files_b = ({file.path: file for file in each.files} for each in (a, b))
    changed = differing(files_a, files_b).items()
    return {
        "a": {"ref": a.ref, "digest": a.digest, "type": a.type},
        "b": {"ref": b.ref, "digest": b.digest, "type": b.type},
        "same": a.digest == b.digest and not attributes,
        "attributes": attributes,
        "inputs": inputs,
        "files": {path: (one and one.size, other and other.size) for path, (one, other) in changed},
    }


def config_changes(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Values]:
    """Dotted config key → value in each, where they differ."""
    return differing(flat(a), flat(b))


def differing(*compared: Mapping[str, Any] | None) -> dict[str, Values]:
    """Name → the value in each, where two of those that are there differ."""
    there = [each for each in compared if each is not None]
    names = sorted({name for each in there for name in each if any(each.get(name) != a.get(name) for a in there)})
    return {name: tuple(None if each is None else each.get(name) for each in compared) for name in names}


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key → value of every value of nested mappings."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        is_group = isinstance(value, Mapping) and value
        found |= flat(value, f"{prefix}{name}.") if is_group else {f"{prefix}{name}": value}
    return found
