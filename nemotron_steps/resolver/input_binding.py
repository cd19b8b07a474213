"""`--input`: which port each one is for. `PORT=REF` means the steps asked for, `STEP.PORT=REF` any step of the plan.

Also inputs among the overrides: `prompts=rows.jsonl` for `--input prompts=rows.jsonl`, which is easily left out.
"""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from nemotron_steps.config.names import meant
from nemotron_steps.config.secrets import redact_text
from nemotron_steps.errors import ConfigError, StepsError
from nemotron_steps.manifest.models import Consumes, StepManifest
from nemotron_steps.resolver import hints
from nemotron_steps.resolver.graph import Graph, Node
from nemotron_steps.resolver.problems import AmbiguousSource, UnknownPort
from nemotron_steps.resolver.request import Compose, Goal, Request

GoalNodes = Sequence[tuple[Goal, Node]]


def assign_bare_inputs(request: Request, graph: Graph, goals: GoalNodes) -> dict[tuple[str, str], str]:
    """(node key, port) → reference, for every `--input` without a step; what fits nowhere is reported."""
    assigned = {}
    for port, reference in request.inputs.items():
        if "." not in port or any(port in node.manifest.inputs for _, node in goals):
            for node in _owners(request, graph, port, reference, goals):
                assigned[node.key, port] = reference
    return assigned


def report_unused(inputs: Mapping[str, str], used: set[str], graph: Graph) -> None:
    """Report every `--input STEP.PORT` that no step of the plan took."""
    for target, reference in inputs.items():
        step, _, port = target.rpartition(".")
        if not step or target in used:
            continue
        where = f"--input {target}={reference}"
        steps = [node for node in graph.nodes.values() if not node.inserted]
        owners = [node for node in steps if step in (node.key, node.manifest.id)]
        for node in owners:
            graph.report(hints.unknown_input(node, port, where))
        if not owners:
            keys = sorted(node.key for node in steps)
            graph.report(
                UnknownPort(
                    f"no step of the plan is called '{step}'",
                    where=where,
                    expected=" or ".join(keys) or "a step of the plan",
                    found=step,
                    hints=tuple(f"--input {name}.{port}={reference}" for name in meant(step, keys)[:2]),
                )
            )


def _owners(request: Request, graph: Graph, port: str, reference: str, goals: GoalNodes) -> list[Node]:
    """The steps a bare `--input` is for: those with that port that nothing else of the request would feed."""
    where = f"--input {port}={reference}"
    having = [(goal, node) for goal, node in goals if port in node.manifest.inputs]
    if len(having) == 1:
        return [having[0][1]]
    if not having:
        known = sorted({name for _, node in goals for name in node.manifest.inputs})
        close = meant(port, known)
        idle = [
            UnknownPort(
                f"{node.key} takes no '{port}' while {key} is {value}",
                chain=(node.at(port),),
                where=where,
                expected=f"another {key}, or no '{port}'",
                found=f"{key}={value}",
                hints=(f"steps show {node.manifest.id}",),
            )
            for _, node in goals
            if (entry := graph.registry.step(node.manifest.id).inputs.get(port)) is not None
            for key, value in entry.unless.items()
            if node.config.flat.get(key) == value
        ]
        for problem in idle:
            graph.report(problem)
        if goals and not idle:
            graph.report(
                UnknownPort(
                    f"no step of the request has an input '{port}'",
                    where=where,
                    expected=" or ".join(known) or "no inputs at all",
                    found=port,
                    hints=tuple(f"--input {name}={reference}" for name in close[:2]),
                )
            )
        return []
    nodes = [node for _, node in goals]
    if request.chained:
        unfed = []
        for _, node in having:  # what an earlier step would feed by itself (see Chain.candidates) is not meant
            entry = node.manifest.inputs[port]
            leading = graph.types.leading_to(entry.auto if isinstance(entry.auto, str) else entry.type)
            before = [output.type for other in nodes[: nodes.index(node)] for output in other.manifest.produces]
            if entry.auto is False or not any(k in leading and (entry.required or not leading[k]) for k in before):
                unfed.append(node)
    else:
        earlier = {goal.name for goal in request.goals if goal.earlier}
        unfed = [n for goal, n in having if port not in goal.wired or goal.wired[port].stage in earlier]
    if not unfed:
        graph.report(
            AmbiguousSource(
                f"several steps of the request have an input '{port}', and each is fed by another step",
                where=where,
                expected="STEP.PORT",
                found=port,
                hints=tuple(f"--input {node.at(port)}={reference}" for _, node in having),
            )
        )
    return unfed


def with_named_ports(manifest: StepManifest, key: str, goal: Goal, request: Request) -> StepManifest:
    """The step with a port for every artifact that is wired or given by `--input` to a port that takes many.

    A port that nothing is named for stays as it is, to be reported as missing."""
    if not any(port.many for port in manifest.consumes):
        return manifest
    given = [*goal.wired]
    for target in request.inputs:
        step = next((step for step in (key, manifest.id) if target.startswith(f"{step}.")), "")
        given.append(target.removeprefix(f"{step}."))
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


def take_out_inputs(
    goal: Goal, key: str, steps: Mapping[str, StepManifest], graph: Graph, compose: Compose, *, alone: bool
) -> tuple[tuple[str, ...], list[tuple[str, str]]]:
    """A step's overrides without those that name an input and that its config refuses; each of them is reported.

    `steps`: key → manifest of the steps whose inputs a bare override may name, the step itself first. `alone`: the
    request has no other step. Returns the overrides that are left, and (step's key, port) of the others."""
    kept: list[str] = []
    taken: list[tuple[str, str]] = []
    for override in goal.overrides:
        name, _, value = override.lstrip("+").partition("=")
        found = _port(name, steps)
        try:  # it may be for the step's config: a port may have the name of a key
            has_key = compose(goal.step_id, goal.config_name, ()).has_key if value and found is not None else None
            is_key = has_key is None or has_key(name)
        except StepsError:
            is_key = True
        if found is None or is_key:
            kept.append(override)
            continue
        owner, port = found
        taken.append((owner, port.name))
        many = port.many and name == port.name
        if len(value) > 2 and value[0] == value[-1] and value[0] in "'\"":  # quotes that Hydra's grammar wants
            value = value[1:-1]
        stage = goal.instance.stage if goal.instance is not None and owner == key else owner
        target = f"{'' if alone else f'{stage}.'}{name}{'.NAME' if many else ''}"
        pasted = f"--input {shlex.quote(redact_text(f'{target}={value}'))}"
        graph.report(
            ConfigError(
                f"'{name}' is an input of {owner}, and an input is given by --input",
                where=f"override '{redact_text(override)}'",
                expected=f"--input {name}{'.NAME' if many else ''}=REF; each input has an --input of its own",
                found="an override",
                hints=(pasted,),
            )
        )
    return tuple(kept), taken


def _port(name: str, steps: Mapping[str, StepManifest]) -> tuple[str, Consumes] | None:
    """The first step, and its port, that `PORT` or, of a port that takes many, `PORT.NAME` is for."""
    for key, manifest in steps.items():
        for port in manifest.consumes:
            if name == port.name or (port.many and name.startswith(f"{port.name}.")):
                return key, port
    return None
