"""Ports that take several artifacts: one port for each of the names that a request gives them, `PORT.NAME`."""

from __future__ import annotations

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
