"""Pasteable advice for a port that cannot be fed: which steps would make what it needs, and how to supply it."""

from __future__ import annotations

from collections.abc import Mapping

from nemotron_steps.manifest.models import Consumes, StepManifest
from nemotron_steps.manifest.registry import Registry
from nemotron_steps.manifest.typegraph import TypeGraph


def producers_of(registry: Registry, wanted: str, limit: int = 2) -> tuple[str, ...]:
    """Ids of steps whose output a port of type `wanted` accepts as it is.

    First those that make it of something else, then those that need one to make another; within each the types
    nearest to `wanted` first, then by id. Converters are left out: they are inserted where they help.
    """
    types = registry.types
    found = [
        (any(p.required and types.is_a(p.type, wanted) for p in manifest.consumes), distance, step_id)
        for step_id, manifest in registry.steps.items()
        for port in manifest.produces
        if types.is_a(port.type, wanted) and not _only_converts(registry, step_id)
        for distance in (types.ancestors(port.type).index(wanted),)
    ]
    return tuple(dict.fromkeys(step_id for _, _, step_id in sorted(found)))[:limit]


def steps_between(registry: Registry, found: str, wanted: str, limit: int = 2) -> tuple[tuple[str, str], ...]:
    """(step, its input port) of steps that make something a port of type `wanted` accepts of a `found`.

    Those that cannot do without it first, then those that need least beside it, then by id. None whose port takes what
    is wanted as well, and any kind of rows: it refuses these by their fields.
    """
    steps = [
        (not port.required, sum(other.required for other in manifest.consumes), step_id, port.name)
        for step_id, manifest in registry.steps.items()
        if any(registry.types.is_a(output.type, wanted) for output in manifest.produces)
        for port in manifest.consumes
        if registry.types.is_a(found, port.type)
        if found == port.type or not registry.types.is_a(wanted, port.type)
    ]
    return tuple((step_id, port) for _, _, step_id, port in sorted(steps)[:limit])


def missing_input_hints(registry: Registry, target: str, port: Consumes, step: str) -> tuple[str, ...]:
    """How to feed a port of a list of steps: supply it, set its config key, or plan a step that makes it first.

    Args:
        target: `PORT` or `STEP.PORT`, as `--input` names it.
        step: the step whose port it is.
    """
    hints = [f"--input {target}=PATH"]
    if port.bindings and not port.many:
        hints.append(f"{next(iter(port.bindings))}=PATH")
    hints += [f"steps plan {producer} {step}" for producer in producers_of(registry, port.type) if producer != step]
    return tuple(hints)


def missing_stage_input_hints(
    types: TypeGraph, target: str, port: Consumes, stage: str, before: Mapping[str, StepManifest]
) -> tuple[str, ...]:
    """How to feed a port of a pipeline's stage: supply it, set its config key, or wire it to an earlier stage.

    Args:
        before: earlier stages by name, in order; the nearest that fits is named.
    """
    hints = [f"--input {target}=PATH"]
    if port.bindings and not port.many:
        hints.append(f"{stage}.{next(iter(port.bindings))}=PATH")
    leading, own = types.leading_to(port.type), port.name + (".NAME" if port.many else "")
    for name, manifest in reversed(list(before.items())):
        if any(output.type in leading for output in manifest.produces):
            hints.append(f'inputs = {{ {own} = "{name}" }}   # in [[stages]] name = "{stage}"')
            break
    return tuple(hints)


def _only_converts(registry: Registry, step_id: str) -> bool:
    return any(step_id in (t.convert_to or {}).values() for t in registry.types.types.values())
