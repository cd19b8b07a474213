"""Whether the artifacts at a step's ports are what it needs, and agree. What is unknown when it is planned passes, and
is checked again by the runner once the artifacts exist."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemotron_steps.manifest.models import StepManifest
from nemotron_steps.resolver.problems import AttributeConflict


def check_attributes(
    manifest: StepManifest,
    known: Mapping[str, Mapping[str, Any]],
    *,
    key: str | None = None,
    sources: Mapping[str, str] | None = None,
) -> list[AttributeConflict]:
    """Every requirement and constraint of a step that the attributes of its inputs break.

    `known`: port → attributes of the artifact bound to it; what is missing breaks nothing. `sources`: port → where its
    artifact comes from, for messages."""
    key = key or manifest.id
    sources = sources or {}
    problems = []
    for port in manifest.consumes:
        have = known.get(port.name, {})
        for name, wanted in port.attributes.items():
            allowed = wanted if isinstance(wanted, list) else [wanted]
            if name in have and have[name] not in allowed:
                problems.append(
                    AttributeConflict(
                        f"'{port.name}' of {key} needs another {name}",
                        chain=[*([sources[port.name]] if port.name in sources else []), f"{key}.{port.name}"],
                        where=manifest.where_input(port.name, "attributes", name),
                        expected=" or ".join(str(value) for value in allowed),
                        found=str(have[name]),
                    )
                )
    for index, constraint in enumerate(manifest.constraints):
        values = [
            (f"{port}.{name}", known[port][name], port)
            for place, name in constraint.terms
            for port in known
            if (port == place or port.startswith(f"{place}.")) and name in known[port]  # PORT.NAME: a port takes many
        ]
        first_term, first_value, first = values[0] if values else ("", None, "")
        for term, value, place in values[1:]:
            if value != first_value:
                compared = f"{sources.get(first, first)} and {sources.get(place, place)}"
                problems.append(
                    AttributeConflict(
                        constraint.description or f"{first_term} and {term} must be the same in {key}",
                        chain=(compared, f"{key}.{first} and {key}.{place}"),
                        where=manifest.where("constraints", index),
                        expected=f"{term} = {first_value} (as {first_term})",
                        found=str(value),
                        hints=(f"--input {place}=PATH   # another one",) if "." in place else (),
                    )
                )
    return problems
