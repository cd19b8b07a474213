"""What is known about the artifact at a port, and whether the artifacts of one step agree.

At plan time only supplied artifacts and what outputs inherit from them are known; whatever is unknown passes and is
checked again by the runner, with `check_attributes`, once the artifacts exist.
"""

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

    Args:
        known: port → attributes of the artifact bound to it. A missing port or attribute breaks nothing.
        key: how the step is called in messages; default its id.
        sources: port → where its artifact comes from, for messages.
    """
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
                        chain=_chain(sources, port.name, key),
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
        for term, value, place in values[1:]:
            first_term, first_value, first_place = values[0]
            if value != first_value:
                problems.append(
                    AttributeConflict(
                        constraint.description or f"{first_term} and {term} must be the same in {key}",
                        chain=(_both(sources, first_place, place), _both({}, f"{key}.{first_place}", f"{key}.{place}")),
                        where=manifest.where("constraints", index),
                        expected=f"{term} = {first_value} (as {first_term})",
                        found=str(value),
                        hints=(f"--input {place}=PATH   # another one",) if "." in place else (),
                    )
                )
    return problems


def _chain(sources: Mapping[str, str], port: str, key: str) -> tuple[str, ...]:
    return (*((sources[port],) if port in sources else ()), f"{key}.{port}")


def _both(sources: Mapping[str, str], one: str, other: str) -> str:
    return f"{sources.get(one, one)} and {sources.get(other, other)}"
