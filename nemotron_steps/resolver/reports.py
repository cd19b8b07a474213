"""The errors about a port, worded in one place: mismatches, missing inputs, unknown ports."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from nemotron_steps.config.names import nearest
from nemotron_steps.errors import did_you_mean
from nemotron_steps.manifest.models import Consumes
from nemotron_steps.manifest.registry import Registry
from nemotron_steps.resolver.foreign_data import ROWS
from nemotron_steps.resolver.graph import Node
from nemotron_steps.resolver.hints import producers_of, steps_between
from nemotron_steps.resolver.problems import AmbiguousSource, MissingInput, TypeMismatch, UnknownPort, WrongDirection


def mismatch(
    registry: Registry, node: Node, port: Consumes, label: str, found: Sequence[str], where: str | None, producer: str
) -> TypeMismatch:
    """What is fed to a port is not of its type, and no conversion leads there.

    Args:
        label: the source in the chain, `STEP.PORT` or a reference.
        found: its type, or the types of all outputs of a step none of which fits.
        where: file:line of the wiring; default the port's own.
        producer: id of the step that made it; empty for a supplied artifact.
    """
    types = registry.types
    target = node.at(port.name)
    backwards = [name for name in found if types.is_a(port.type, name)]
    hints = []
    for name in found:
        for step, entrance in steps_between(registry, name, port.type):
            if not producer:
                made = f"{port.type} of such rows" if port.type in ROWS else f"a {port.type} of it"
                hints.append(f"steps run {step} --input {entrance}={label}   # makes {made}")
            elif step not in (producer, node.manifest.id):
                hints.append(f"steps plan {producer} {step} {node.manifest.id}")
    hints += [f"steps plan {step} {node.manifest.id}" for step in producers_of(registry, port.type) if step != producer]
    shown = " or ".join(found) or "no output at all"
    accepted = _accepted(registry, port.type)
    if not producer and port.type in ROWS:
        accepted += f": rows like {ROWS[port.type]}"
    if backwards:
        return WrongDirection(
            f"'{port.name}' of {node.key} needs {port.type}, and not every {backwards[0]} is one",
            chain=(label, target),
            where=where or node.manifest.where_input(port.name),
            expected=accepted,
            found=f"{shown} ({port.type} is_a {backwards[0]}, not the other way round)",
            hints=tuple(dict.fromkeys(hints))[:3],
        )
    return TypeMismatch(
        f"'{port.name}' of {node.key} cannot take {shown}",
        chain=(label, target),
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
        expected=f"{port.type}{_tail(port)}",
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


def idle_input(registry: Registry, node: Node, name: str, where: str) -> list[UnknownPort]:
    """An input port that the step does not have under its config; none where the config is not why."""
    port = registry.step(node.manifest.id).inputs.get(name)
    flat = {} if node.config is None else node.config.flat
    return [
        UnknownPort(
            f"{node.key} takes no '{name}' while {key} is {value}",
            chain=(node.at(name),),
            where=where,
            expected=f"another {key}, or no '{name}'",
            found=f"{key}={value}",
            hints=(f"steps show {node.manifest.id}",),
        )
        for key, value in (port.unless.items() if port is not None else ())
        if flat.get(key) == value
    ]


def unnamed(node: Node, port: Consumes, named: str, where: str | None) -> UnknownPort:
    """An artifact is given to a port that takes many, each under a name, without one.

    Args:
        named: how it is given with a name.
    """
    return UnknownPort(
        f"'{port.name}' of {node.key} takes several artifacts, each under a name",
        chain=(node.at(port.name),),
        where=where,
        expected=named,
        found="no name",
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


def _accepted(registry: Registry, wanted: str) -> str:
    narrower = registry.types.descendants(wanted)
    return f"{wanted} (or {', '.join(narrower)})" if narrower else wanted


def _tail(port: Consumes) -> str:
    return f" ({port.description.strip().rstrip('.')})" if port.description else ""
