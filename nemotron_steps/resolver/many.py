"""Ports that take several artifacts: one port for each of the names that a request gives them, `PORT.NAME`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemotron_steps.manifest.models import Consumes, StepManifest
from nemotron_steps.resolver.request import Goal, Request


def with_named_ports(manifest: StepManifest, key: str, goal: Goal, request: Request) -> StepManifest:
    """The step with a port for every artifact that is wired or given by `--input` to a port that takes many.

    A port that nothing is named for stays as it is, to be reported as missing.

    Args:
        key: how the plan calls the step; `--input KEY.PORT.NAME` is for it alone.
    """
    if not any(port.many for port in manifest.consumes):
        return manifest
    given = [*goal.wired]
    for target in request.inputs:
        own = next((target[len(step) + 1 :] for step in (key, manifest.id) if target.startswith(f"{step}.")), target)
        given.append(own)
    ports: list[Consumes] = []
    for port in manifest.consumes:
        prefix = f"{port.name}."
        names = dict.fromkeys(name[len(prefix) :] for name in given if name.startswith(prefix)) if port.many else {}
        ports += [port.named(name) for name in names] or [port]
    return manifest.with_ports(tuple(ports))


def with_sources_of_config(manifest: StepManifest, inputs: Mapping[str, Any]) -> tuple[StepManifest, dict[str, Any]]:
    """The same for what a config's `inputs` names, `{PORT: {NAME: source}}`, where the request names nothing for a
    port; with the config's sources under `PORT.NAME`."""
    sources = dict(inputs)
    if not any(port.many or "." in port.name for port in manifest.consumes):
        return manifest, sources
    named = {port.name.partition(".")[0] for port in manifest.consumes if "." in port.name}
    ports: list[Consumes] = []
    for port in manifest.consumes:
        own = sources.get(port.name) if port.many else None
        if not isinstance(own, Mapping) or own.keys() & {"step", "ref"}:
            ports.append(port)
            continue
        del sources[port.name]
        ports += [port.named(str(name)) for name in own]
        sources.update({f"{port.name}.{name}": source for name, source in own.items()})
    for name in named:
        sources.pop(name, None)
    return manifest.with_ports(tuple(ports)), sources
