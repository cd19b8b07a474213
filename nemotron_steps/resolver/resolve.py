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
from nemotron_steps.resolver import checks
from nemotron_steps.resolver.graph import Graph, Node
from nemotron_steps.resolver.plan import Plan, StepOutput, SuppliedInput
from nemotron_steps.resolver.problems import FILLABLE, PlanProblem, raise_all
from nemotron_steps.resolver.request import Compose, DescribeInput, Newest, Request
from nemotron_steps.resolver.sources import Sources, add_goal

_Facts = tuple[dict[str, Mapping[str, Any]], dict[str, SuppliedInput]]
"""Port → what is known of the artifact that will be there, and port → the supplied one that it is known of."""
_OVERRIDE = re.compile(r"\+*[\w.]+=|~[\w.]+")


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
    because = f"stage of {request.name}" if request.name else "asked for"
    asked = [(goal, add_goal(goal, request, graph, because)) for goal in request.goals if not goal.earlier]
    goals = [(goal, node) for goal, node in asked if node is not None]
    nodes = [node for _, node in goals]
    sources = Sources(request, graph, describe_input, goals, newest)
    for goal, node in goals:
        sources.feed(node, goal)
    while sources.pending:
        sources.feed(*sources.pending.popleft())
    sources.report_unused()
    order = graph.in_order(nodes)
    facts, conflicts = _check_inputs(order, graph)
    subjects: dict[str, checks.CheckSubject] = {}
    for node in order:
        if not node.composed:
            continue
        of_job = {key: value for key, (value, _) in node.config.job.items() if value is not None}
        at_port, origins = facts[node.key]
        subject = checks.CheckSubject(
            node.key, node.manifest, node.config, {**(profile or {}), **of_job}, at_port, node.inputs, origins
        )
        subjects[node.key] = subject
        for problem in (
            *checks.check_parameters(node.manifest, node.config, node.key),
            *checks.check_placeholders(node.manifest, node.config, node.key, {*node.inputs, *node.failed}),
            *(problem for check in checks.CHECKS for problem in check(subject)),
        ):
            if node.inserted:
                _hint_at_fed(problem, node, order)
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


def _remarks(order: Sequence[Node], goals: Sequence[Node], graph: Graph) -> Iterator[str]:
    """What stops nothing, each one sentence."""
    for manifest in (node.manifest for node in goals):
        if hidden := graph.registry.hidden_by(manifest):
            yield f"{manifest.id} is that of pack {manifest.pack}; there is also {' and '.join(hidden)}"
    for node in order:
        if node.config.unread is not None:
            yield f"the config of {node.key}, which has no implementation here, cannot be read: {node.config.unread}"
        for port, source in node.inputs.items():  # environment variables that are set and change nothing here
            key = next(iter(node.manifest.inputs[port].bindings), None)
            taken = key is None or getattr(source, "config_key", None) == key
            for name in () if taken else node.config.variables.get(key or "", ()):
                instead = f'--input {port}="${name}" takes it instead'
                yield f"{name} is set, but '{port}' of {node.key} is {graph.label(source)}; {instead}"


def _hint_at_fed(problem: StepsError, converter: Node, order: Sequence[Node]) -> None:
    """The user has not heard of a converter: its input is given as that of the step that it feeds."""
    fed = next(
        port
        for node in order
        for port, source in node.inputs.items()
        if isinstance(source, StepOutput) and source.step_key == converter.key
    )
    own = f"--input {next(iter(converter.inputs))}="
    problem.hints = tuple(hint.replace(own, f"--input {fed}=") for hint in problem.hints)


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
            words = [re.sub(r"^([+~]*)", rf"\g<1>{name}.", word) for word in words]
        hints.append(" ".join(words) + comment + text)
    problem.hints = tuple(hints)


def _check_inputs(order: Sequence[Node], graph: Graph) -> tuple[dict[str, _Facts], list[PlanProblem]]:
    """Attributes of supplied artifacts, carried along outputs that inherit them, against what ports need: of every step
    what is known of its inputs, and every conflict."""
    conflicts: list[PlanProblem] = []
    known: dict[StepOutput, tuple[Mapping[str, Any], SuppliedInput | None]] = {}
    facts: dict[str, _Facts] = {}
    origin: SuppliedInput | None
    for node in order:
        at_port: dict[str, Mapping[str, Any]] = {}
        origins: dict[str, SuppliedInput] = {}
        for port, source in node.inputs.items():
            if isinstance(source, SuppliedInput):
                at_port[port], origin = source.attributes, source
            else:
                at_port[port], origin = known.get(source, ({}, None))
            if origin is not None:
                origins[port] = origin
        facts[node.key] = at_port, origins
        labels = {port: graph.label(source) for port, source in node.inputs.items()}
        problems = checks.check_attributes(node.manifest, at_port, key=node.key, sources=labels)
        conflicts += problems
        # What will be recorded of a model that is made from scratch, but for its positions: small models made to try a
        # config of a large one have fewer than that asks for.
        given = any(output.inherits in node.inputs for output in node.manifest.produces)
        model = None if given else ModelSpec.from_scratch(node.config.flat.get)
        new = {} if model is None else replace(model, positions=None).attributes()
        for output in node.manifest.produces:
            kept, origin = new if output.inherits is not None else {}, None
            if output.inherits in node.inputs and not problems:  # what is wrong here is told once
                declared = [graph.types.types.get(name) for name in graph.types.ancestors(output.type)]
                names = {name for each in declared if each is not None for name in each.attributes}
                kept = {name: value for name, value in at_port[output.inherits].items() if name in names}
                origin = origins.get(output.inherits)
            known[StepOutput(node.key, output.name)] = {**kept, **output.attributes}, origin
    return facts, conflicts
