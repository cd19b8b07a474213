"""What two artifacts of one type have and have not in common: attributes, files, rows, weights, inputs, lineage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nemotron_steps.artifacts.compare_rows import RowChanges, compare_rows
from nemotron_steps.artifacts.compare_tensors import TensorChanges, compare_tensors, tensors_of
from nemotron_steps.artifacts.lineage import lineage
from nemotron_steps.artifacts.models import Artifact, short_digest
from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.errors import ArtifactError

Pair = tuple[Any, Any]
"""A value in the first artifact and in the second; None where one lacks it."""


@dataclass
class Difference:
    """Two artifacts side by side.

    Attributes:
        attributes, inputs: name → value, or port → reference, in each, where they differ.
        ancestors: what only the first, and only the second, was made from in the end.
        files: path → sizes in bytes, where the contents differ or one lacks it.
        rows: JSON Lines file that both have → what changed.
        tensors: None where neither has safetensors weights, or all of them are in files that are the same.
    """

    a: Artifact
    b: Artifact
    attributes: dict[str, Pair] = field(default_factory=dict)
    inputs: dict[str, Pair] = field(default_factory=dict)
    ancestors: tuple[list[str], list[str]] = field(default_factory=lambda: ([], []))
    files: dict[str, Pair] = field(default_factory=dict)
    rows: dict[str, RowChanges] = field(default_factory=dict)
    tensors: TensorChanges | None = None

    @property
    def same(self) -> bool:
        """Whether they hold the same files and attributes, wherever they come from."""
        return self.a.digest == self.b.digest and not self.attributes

    def to_dict(self) -> dict[str, Any]:
        """JSON-serialisable form."""
        return {
            "a": {"ref": self.a.ref, "digest": self.a.digest, "type": self.a.type},
            "b": {"ref": self.b.ref, "digest": self.b.digest, "type": self.b.type},
            "same": self.same,
            "attributes": self.attributes,
            "inputs": self.inputs,
            "ancestors": {"only_a": self.ancestors[0], "only_b": self.ancestors[1]},
            "files": self.files,
            "rows": {path: changes.to_dict() for path, changes in self.rows.items()},
            "tensors": None if self.tensors is None else self.tensors.to_dict(),
        }


def compare(store: ArtifactStore, ref_a: str, ref_b: str) -> Difference:
    """Compare two artifacts, each verified when it is opened.

    Raises ArtifactError if they are of different types, or one of them is broken.
    """
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
    found = Difference(a, b, _differing(a.attributes, b.attributes), _inputs(a, b), _ancestors(store, a, b))
    if a.digest == b.digest:
        return found
    files_a, files_b = ({file.path: file for file in each.files} for each in (a, b))
    for path in sorted(files_a.keys() | files_b.keys()):
        one, other = files_a.get(path), files_b.get(path)
        if one is None or other is None or one.sha256 != other.sha256:
            found.files[path] = (one and one.size, other and other.size)
            if path.endswith(".jsonl") and one is not None and other is not None:
                found.rows[path] = compare_rows(a.path / path, b.path / path)
    if any(path.endswith(".safetensors") for path in found.files):
        found.tensors = compare_tensors(tensors_of(a.path), tensors_of(b.path))
    return found


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Every value of nested mappings under its dotted key."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            found.update(flat(value, f"{prefix}{name}."))
        else:
            found[f"{prefix}{name}"] = value
    return found


def _differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Pair]:
    return {name: (a.get(name), b.get(name)) for name in sorted({**a, **b}) if a.get(name) != b.get(name)}


def config_changes(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Pair]:
    """Dotted config key → value in each, where they differ."""
    return _differing(flat(a), flat(b))


def _inputs(a: Artifact, b: Artifact) -> dict[str, Pair]:
    edges = [{edge.port: edge for edge in each.inputs} for each in (a, b)]
    found: dict[str, Pair] = {}
    for port in sorted(edges[0].keys() | edges[1].keys()):
        one, other = edges[0].get(port), edges[1].get(port)
        if one is None or other is None or one.digest != other.digest:
            names = (None if each is None else each.ref or short_digest(each.digest) for each in (one, other))
            found[port] = (next(names), next(names))
    return found


def _ancestors(store: ArtifactStore, a: Artifact, b: Artifact) -> tuple[list[str], list[str]]:
    one, other = ({link.parent for link in lineage(store, each).ancestors} for each in (a, b))
    return sorted(one - other), sorted(other - one)
