"""The errors about ports, worded in one place, and what to paste for each: the steps that would make what is needed."""

import shlex
from collections.abc import Sequence

from nemotron_steps.config.names import nearest
from nemotron_steps.errors import did_you_mean
from nemotron_steps.manifest.models import Consumes
from nemotron_steps.manifest.registry import Registry
from nemotron_steps.manifest.typegraph import TypeGraph
from nemotron_steps.resolver.graph import Node
from nemotron_steps.resolver.problems import AmbiguousSource, MissingInput, TypeMismatch, UnknownPort, WrongDirection

ROWS = {
    "rl_prompts": '{"prompt": "What is 1 + 1?", "answer": "2"}',
    "sft_chats": '{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}',
    "packed_chats": '{"input_ids": [5, 7, 2], "loss_mask": [0, 1, 0], "seq_start_id": [0]}',
    "preference_pairs": '{"prompt": "…", "chosen": "…", "rejected": "…"}',
}
"""What one row of a data set of each type looks like."""


def mismatch(
    registry: Registry, node: Node, port: Consumes, label: str, found: Sequence[str], where: str | None, producer: str
) -> TypeMismatch:
    """What is fed to a port is not of its type, and no conversion leads there.

    `label`: the source in the chain. `found`: its type, or those of all outputs of a step. `producer`: id of the step
    that made it; empty for a supplied artifact."""
    types = registry.types
    backwards = [name for name in found if types.is_a(port.type, name)]
    hints = []
    for name in found:
        # Of the steps that make it of that: first those that cannot do without, then those that need least beside it.
        # None whose port takes what is wanted as well, and any kind of rows: it refuses these by their fields.
        steps = [
            (not entry.required, sum(other.required for other in manifest.consumes), step_id, entry.name)
            for step_id, manifest in registry.steps.items()
            if any(types.is_a(output.type, port.type) for output in manifest.produces)
            for entry in manifest.consumes
            if types.is_a(name, entry.type) and (name == entry.type or not types.is_a(port.type, entry.type))
        ]
        for _, _, step, entrance in sorted(steps)[:2]:
            if not producer:
                made = f"{port.type} of such rows" if port.type in ROWS else f"a {port.type} of it"
                hints.append(f"steps run {step} --input {entrance}={label}   # makes {made}")
            elif step not in (producer, node.manifest.id):
                hints.append(f"steps plan {producer} {step} {node.manifest.id}")
    hints += [f"steps plan {step} {node.manifest.id}" for step in producers_of(registry, port.type) if step != producer]
    shown = " or ".join(found) or "no output at all"
    narrower = types.descendants(port.type)
    accepted = f"{port.type} (or {', '.join(narrower)})" if narrower else port.type
    if not producer and port.type in ROWS:
        accepted += f": rows like {ROWS[port.type]}"
    kind, what = TypeMismatch, f"'{port.name}' of {node.key} cannot take {shown}"
    if backwards:
        kind = WrongDirection
        what = f"'{port.name}' of {node.key} needs {port.type}, and not every {backwards[0]} is one"
        shown += f" ({port.type} is_a {backwards[0]}, not the other way round)"
    return kind(
        what,
        chain=(label, node.at(port.name)),
        where=where or node.manifest.where_input(port.name),
        expected=accepted,
        found=shown,
        hints=tuple(dict.fromkeys(hints))[:3],
    )


def missing(node: Node, port: Consumes, hints: Sequence[str], what: str = "") -> MissingInput:
    """Nothing feeds a required port."""
    return MissingInput(
        what or f"nothing feeds '{port.name}' of {node.key}",
        chain=(node.at(port.name),),
        where=node.manifest.where_input(port.name),
        expected=port.type + (f" ({port.description.strip().rstrip('.')})" if port.description else ""),
        found="no --input, no earlier step, no source in the config",
        hints=hints,
    )


def unknown_input(node: Node, name: str, where: str | None) -> UnknownPort:
    """An input port that the step does not have."""
    ports = node.manifest.inputs
    return UnknownPort(
        f"{node.key} has no input '{name}'",
        chain=(node.at(name),),
        where=where or node.manifest.where("step", "id"),
        expected=" or ".join(ports) or "no inputs at all",
        found=name,
        hints=(*did_you_mean(nearest(name, ports, 1)), f"steps show {node.manifest.id}"),
    )


def ambiguous(
    node: Node, port: Consumes, sources: Sequence[str], where: str | None, hints: Sequence[str]
) -> AmbiguousSource:
    """Several outputs fit a port equally well."""
    return AmbiguousSource(
        f"several outputs could feed '{port.name}' of {node.key}",
        chain=(" or ".join(sources), node.at(port.name)),
        where=where or node.manifest.where_input(port.name),
        expected=f"one {port.type}",
        found=", ".join(sources),
        hints=hints,
    )


def two_sources(node: Node, port: Consumes, reference: str, override: str) -> AmbiguousSource:
    """A port is given on the command line twice: by `--input` and by an override of its config key."""
    asked = f"--input {shlex.quote(f'{port.name}={reference}')}"
    return AmbiguousSource(
        f"'{port.name}' of {node.key} is given twice",
        chain=(f"{asked} or {override}", node.at(port.name)),
        where=f"override '{override}'",
        expected="one of them",
        found=f"{asked} and {override}",
        hints=(f"{asked}   # without the override",),
    )


def producers_of(registry: Registry, wanted: str, limit: int = 2) -> tuple[str, ...]:
    """Ids of steps whose output a port of type `wanted` accepts as it is: first those that make it of something else.
    Converters are left out: they are inserted where they help."""
    types = registry.types
    converters = {step for each in types.types.values() for step in (each.convert_to or {}).values()}
    found = [
        (any(p.required and types.is_a(p.type, wanted) for p in manifest.consumes), distance, step_id)
        for step_id, manifest in registry.steps.items()
        for port in manifest.produces
        if types.is_a(port.type, wanted) and step_id not in converters
        for distance in (types.ancestors(port.type).index(wanted),)
    ]
    return tuple(dict.fromkeys(step_id for _, _, step_id in sorted(found)))[:limit]


def missing_input_hints(registry: Registry, target: str, port: Consumes, step: str) -> list[str]:
    """How to feed a port of a list of steps. `target`: `PORT` or `STEP.PORT`, as `--input` names it."""
    hints = [f"--input {target}=PATH"]
    if port.bindings and not port.many:
        hints.append(f"{next(iter(port.bindings))}=PATH")
    return hints + [f"steps plan {each} {step}" for each in producers_of(registry, port.type) if each != step]


def missing_stage_input_hints(
    types: TypeGraph, target: str, port: Consumes, stage: str, before: Sequence[Node]
) -> list[str]:
    """How to feed a port of a pipeline's stage. `before`: the stages before it; the nearest that fits is named."""
    hints = [f"--input {target}=PATH"]
    if port.bindings and not port.many:
        hints.append(f"{stage}.{next(iter(port.bindings))}=PATH")
    leading, own = types.leading_to(port.type), port.name + (".NAME" if port.many else "")
    for earlier in reversed(before):
        if any(output.type in leading for output in earlier.manifest.produces):
            return [*hints, f'inputs = {{ {own} = "{earlier.key}" }}   # in [[stages]] name = "{stage}"']
    return hints
