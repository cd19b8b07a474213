"""Goal and what exists → a plan, or every error in it. Nothing is run, written or imported here, and nothing is raised
before everything has been looked at."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nemotron_steps.config.layout.model_spec import ModelSpec
from nemotron_steps.errors import StepsError
from nemotron_steps.manifest.packs import BUILT_IN, unusable_code
from nemotron_steps.manifest.registry import Registry
from nemotron_steps.resolver.checks import CHECKS, CheckSubject
from nemotron_steps.resolver.config_checks import (
    check_attributes,
    check_parameters,
    check_placeholders,
    merge_placeholders,
)
from nemotron_steps.resolver.graph import Graph, Node
from nemotron_steps.resolver.input_binding import assign_bare_inputs, report_unused, take_out_inputs, with_named_ports
from nemotron_steps.resolver.plan import Plan, StepOutput, SuppliedInput
from nemotron_steps.resolver.problems import FILLABLE, AttributeConflict, PlanProblem, raise_all
from nemotron_steps.resolver.request import Compose, DescribeInput, Goal, Newest, Request
from nemotron_steps.resolver.sources import Sources

_OVERRIDE = re.compile(r"\+*[\w.]+=|~[\w.]+")


def _goal_nodes(request: Request, graph: Graph, compose: Compose) -> list[tuple[Goal, Node]]:
    """The steps asked for, with the ports that the request names. Overrides that are inputs are reported."""
    goals: list[tuple[Goal, Node]] = []
    because = f"stage of {request.name}" if request.name else "asked for"
    steps = [
        (goal, goal.name or manifest.id, manifest)
        for goal in request.goals
        if not goal.earlier and (manifest := graph.find_step(goal.step_id, goal.where.get(""))) is not None
    ]
    every = {key: manifest for _, key, manifest in steps}
    misplaced: list[tuple[str, str]] = []
    for goal, key, own in steps:
        # A bare override of a list is the last step's; an input may be any step's.
        near = {key: own, **(every if request.chained and goal.overrides else {})}
        overrides, taken = take_out_inputs(goal, key, near, graph, compose, alone=len(request.goals) == 1)
        manifest = with_named_ports(own, key, goal, request)
        node = graph.add(key, manifest, goal.config_name, overrides, because)
        node.instance, node.checks = goal.instance, goal.checks
        goals.append((goal, node))
        misplaced += [(node.key if owner == key else owner, port) for owner, port in taken]
    for key, port in misplaced:  # that nothing feeds it need not be said as well
        graph.nodes[key].failed.add(port)
    return goals


def resolve(
    request: Request,
    registry: Registry,
    *,
    compose: Compose,
    describe_input: DescribeInput,
    newest: Newest = lambda step_id, config_name, port: None,
    profile: Mapping[str, Any] | None = None,
    known: Sequence[StepsError] = (),
    allow_unfilled: bool = False,
) -> Plan:
    """Type-check a request and return its plan, or raise PlanError with every problem found.

    `newest` finds what earlier runs left, `profile` is that of env.toml, `known` was found wrong before. With
    `allow_unfilled`, inputs that nothing feeds or that are not here, and placeholders, are the plan's `unfilled`
    instead of errors."""
    problems: list[StepsError] = [problem for error in known for problem in getattr(error, "problems", ()) or (error,)]
    graph = Graph(registry, compose, problems)
    goals = _goal_nodes(request, graph, compose)
    bare = assign_bare_inputs(request, graph, goals)
    sources = Sources(request, graph, describe_input, goals, bare, newest)
    for goal, node in goals:
        sources.feed(node, goal)
        if request.chained:
            sources.extend_chain(node)
    while sources.pending:
        sources.feed(*sources.pending.popleft())
    report_unused(request.inputs, sources.used | {port for _, port in bare}, graph)
    nodes = [node for _, node in goals]
    order = graph.in_order(nodes)
    artifacts, origins, conflicts = _check_inputs(order, graph)
    subjects: dict[str, CheckSubject] = {}
    for node in order:
        if not node.composed:
            continue
        of_job = {key: value for key, (value, _) in node.config.job.items() if value is not None}
        known_of = (artifacts[node.key], node.inputs, origins[node.key])
        subject = CheckSubject(node.key, node.manifest, node.config, {**(profile or {}), **of_job}, *known_of)
        subjects[node.key] = subject
        for problem in _config_problems(node, subject, order):
            _address(problem, node, request, nodes)
            graph.report(problem)
    for manifest in (node.manifest for node in order if node.manifest.pack != BUILT_IN):
        named = manifest.step.model_dump(include={"entry", "preflight"})
        for unusable in unusable_code(manifest.id, named, manifest.where):
            graph.report(unusable)
    for conflict in conflicts:
        graph.report(conflict)
    for node, uncomposed in graph.uncomposed if len(graph.nodes) > 1 else ():  # of several steps, say which it is
        if node.key not in uncomposed.what:
            uncomposed.what = f"{node.key}: {uncomposed.what}"
        _address(uncomposed, node, request, nodes)
    problems = merge_placeholders(problems)
    unfilled = tuple(problem for problem in problems if allow_unfilled and isinstance(problem, FILLABLE))
    raise_all([problem for problem in problems if problem not in unfilled], f"cannot plan '{request.command}'")
    return Plan(
        tuple(node.planned(subjects.get(node.key)) for node in order),
        tuple(node.key for node in nodes),
        request.name or request.command,
        (*sources.notes, *_remarks(order, nodes, graph)),
        unfilled,
        sources.taken,
    )


def _config_problems(node: Node, subject: CheckSubject, order: Sequence[Node]) -> Iterator[PlanProblem]:
    """Parameters, placeholders and arithmetic of one step."""
    for problem in (
        *check_parameters(node.manifest, node.config, node.key),
        *check_placeholders(node.manifest, node.config, node.key, {*node.inputs, *node.failed}),
        *(problem for check in CHECKS for problem in check(subject)),
    ):
        if node.inserted:  # the user has not heard of it: its input is given as that of the step that it feeds
            fed = [
                port
                for other in order
                for port, source in other.inputs.items()
                if isinstance(source, StepOutput) and source.step_key == node.key
            ]
            own, port = f"--input {next(iter(node.inputs))}=", f"--input {fed[0]}="
            problem.hints = tuple(hint.replace(own, port) for hint in problem.hints)
        yield problem


def _address(problem: StepsError, node: Node, request: Request, goals: Sequence[Node]) -> None:
    """Put the step in front of the keys of overrides, where the command line would take them for another step's."""
    if request.chained and (node not in goals[:-1] or node.manifest.id == goals[-1].manifest.id):
        return
    name = node.manifest.id if request.chained else node.key
    hints = []
    for hint in problem.hints:
        overrides, comment, text = hint.partition("   #")
        words = overrides.split(" ")
        if all(_OVERRIDE.match(word) for word in words):
            signs = [word[: len(word) - len(word.lstrip("+~"))] for word in words]
            words = [f"{sign}{name}.{word.removeprefix(sign)}" for sign, word in zip(signs, words, strict=True)]
        hints.append(" ".join(words) + comment + text)
    problem.hints = tuple(hints)


def _check_inputs(
    order: Sequence[Node], graph: Graph
) -> tuple[dict[str, dict[str, Mapping[str, Any]]], dict[str, dict[str, SuppliedInput]], list[AttributeConflict]]:
    """Attributes of supplied artifacts, carried along outputs that inherit them, against what ports need.

    Returns step key → port → what is known of the artifact that will be there; the same for the supplied one that it is
    known of; and every conflict."""
    conflicts: list[AttributeConflict] = []
    known: dict[tuple[str, str], Mapping[str, Any]] = {}
    inherited_from: dict[tuple[str, str], SuppliedInput] = {}
    found: dict[str, dict[str, Mapping[str, Any]]] = {}
    origins: dict[str, dict[str, SuppliedInput]] = {}
    for node in order:
        at_port = found[node.key] = {}
        from_port = origins[node.key] = {}
        for port, source in node.inputs.items():
            if isinstance(source, SuppliedInput):
                at_port[port], from_port[port] = source.attributes, source
                continue
            at_port[port] = known.get((source.step_key, source.port), {})
            if (source.step_key, source.port) in inherited_from:
                from_port[port] = inherited_from[source.step_key, source.port]
        # What will be recorded of a model that is made from scratch, but for its positions: small models made to try a
        # config of a large one have fewer than that asks for.
        given = any(output.inherits in node.inputs for output in node.manifest.produces)
        model = None if given else ModelSpec.from_scratch(node.config.flat.get)
        new = {} if model is None else replace(model, positions=None).attributes()
        for output in node.manifest.produces:
            attributes = {**(new if output.inherits is not None else {}), **output.attributes}
            if attributes:
                known[node.key, output.name] = attributes
        if any(at_port.values()):
            labels = {port: graph.label(source) for port, source in node.inputs.items()}
            problems = check_attributes(node.manifest, at_port, key=node.key, sources=labels)
            conflicts += problems
            for output in node.manifest.produces:
                if output.inherits in node.inputs and not problems:  # what is wrong here is told once
                    declared = [graph.types.types.get(name) for name in graph.types.ancestors(output.type)]
                    names = {name for each in declared if each is not None for name in each.attributes}
                    inherited = at_port.get(output.inherits, {})
                    kept = {n: v for n, v in inherited.items() if n in names}
                    known[node.key, output.name] = {**kept, **output.attributes}
                    if output.inherits in from_port:
                        inherited_from[node.key, output.name] = from_port[output.inherits]
    return found, origins, conflicts


def _remarks(order: Sequence[Node], goals: Sequence[Node], graph: Graph) -> Iterator[str]:
    """What stops nothing, each one sentence."""
    for node in goals:
        if hidden := graph.registry.hidden_by(node.manifest):
            yield f"{node.manifest.id} is that of pack {node.manifest.pack}; there is also {' and '.join(hidden)}"
    for node in order:
        if node.config.unread is not None:
            yield f"the config of {node.key}, which has no implementation here, cannot be read: {node.config.unread}"
    # Environment variables that are set, are meant for a step, and change nothing here.
    for node in order:
        for port in node.manifest.consumes:
            key, source = next(iter(port.bindings), None), node.inputs.get(port.name)
            if key is None or source is None or getattr(source, "config_key", None) == key:
                continue
            for name in node.config.variables.get(key, ()):
                yield (
                    f"{name} is set, but '{port.name}' of {node.key} is {graph.label(source)}; "
                    f'--input {port.name}="${name}" takes it instead'
                )
    # Steps of the request, other than the last, whose outputs nothing reads; a report is an end in itself.
    used = {s.step_key for node in order for s in node.inputs.values() if isinstance(s, StepOutput)}
    last = goals[-1].instance if goals else None
    for node in goals[:-1]:
        is_end = node.manifest.step.category == "eval" or (node.instance and last and node.instance.stage == last.stage)
        if node.key not in used and node.manifest.produces and not is_end:
            yield f"nothing in this plan reads what {node.key} produces"
