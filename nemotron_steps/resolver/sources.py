"""Where a port's artifact comes from, and whether it fits. First that applies:

1. `--input PORT=REF` (or `STEP.PORT=REF`), or an override that sets the port's config key; both are a contradiction
2. the wiring of a pipeline file
3. in a plain list of steps, the nearest earlier step with an output the port accepts, directly or through conversions
   (for an optional port: directly only); of that step's outputs the one with the fewest conversions, and two equally
   good ones are ambiguous
4. an environment variable that the port's config key takes its value from, where it is set
5. the config's own `inputs` section: a step to run first, what an earlier run of one left, or a reference
6. a value already at the port's config key
"""

import shlex
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nemotron_steps.config.names import meant, nearest
from nemotron_steps.config.secrets import redact_text
from nemotron_steps.errors import StepsError, did_you_mean
from nemotron_steps.manifest.models import Consumes, StepManifest
from nemotron_steps.manifest.pipeline_models import StageSource
from nemotron_steps.manifest.typegraph import TypeGraph
from nemotron_steps.resolver import problems
from nemotron_steps.resolver.checks import is_placeholder
from nemotron_steps.resolver.graph import DEFAULT, Graph, Node
from nemotron_steps.resolver.plan import InputSource, StepOutput, SuppliedInput
from nemotron_steps.resolver.request import DescribeInput, Goal, Newest, Request

_SOURCE_KEYS = frozenset({"step", "config", "overrides", "port", "existing", "ref"})
_EXISTING = (None, "prefer", "require")
"""Of a step that a config names as a source: run it; take the newest that it left in the home under that config, else
run it; or take that and never run it. One with `overrides` is always run: they say what is wanted."""


@dataclass
class Chain:
    """The outputs of the steps of a list so far."""

    types: TypeGraph
    steps: list[list[tuple[StepOutput, str]]] = field(default_factory=list)
    """Of each step its outputs with their types."""
    latest: dict[str, int] = field(default_factory=dict)
    """Type → position of the latest step with an output of exactly that type."""

    def add(self, key: str, manifest: StepManifest) -> None:
        """Append a step's outputs."""
        self.latest.update(dict.fromkeys((port.type for port in manifest.produces), len(self.steps)))
        self.steps.append([(StepOutput(key, port.name), port.type) for port in manifest.produces])

    def candidates(self, port: Consumes) -> list[tuple[StepOutput, str]]:
        """The best outputs for a port: empty if there is none, more than one if it is ambiguous."""
        if port.auto is False:
            return []
        leading = self.types.leading_to(port.auto if isinstance(port.auto, str) else port.type)
        most = len(leading) if port.required else 0  # conversions; an optional port is fed directly or not at all
        # Looked up by type, as lists may be long.
        nearest_step = max((self.latest.get(name, -1) for name, hops in leading.items() if hops <= most), default=-1)
        if nearest_step < 0:
            return []
        usable = [each for each in self.steps[nearest_step] if leading.get(each[1], most + 1) <= most]
        fewest = min(leading[kind] for _, kind in usable)
        return [each for each in usable if leading[each[1]] == fewest]


def with_named_ports(manifest: StepManifest, names: Iterable[str]) -> StepManifest:
    """The step with a port of its own for every `PORT.NAME` of a port that takes many. A port that nothing is named for
    stays as it is, to be reported as missing."""
    if not any(port.many for port in manifest.consumes):
        return manifest
    ports: list[Consumes] = []
    for port in manifest.consumes:
        prefix = f"{port.name}."
        own = dict.fromkeys(name.removeprefix(prefix) for name in names if port.many and name.startswith(prefix))
        ports += [port.named(name) for name in own] or [port]
    return manifest.with_ports(tuple(ports))


def add_goal(goal: Goal, request: Request, graph: Graph, because: str) -> Node | None:
    """A step that was asked for, with the ports that the request names; None where there is no such step, which is
    reported. Of an override that is an input it is said how inputs are given."""
    try:
        manifest = graph.find_step(goal.step_id, goal.where.get(""))
    except StepsError as error:
        graph.report(error)
        return None
    key = goal.name or manifest.id
    named = [target.removeprefix(f"{key}.").removeprefix(f"{manifest.id}.") for target in request.inputs]
    ported = with_named_ports(manifest, [*goal.wired, *named])
    node = graph.add(key, ported, goal.config_name, goal.overrides, because)
    node.earlier, node.instance, node.checks = goal.earlier, goal.instance, goal.checks
    stage = "" if len(request.goals) == 1 else f"{goal.instance.stage if goal.instance else key}."
    for override in goal.overrides:
        name, _, value = override.lstrip("+").partition("=")
        port = manifest.inputs.get(name.partition(".")[0])
        for owner, problem in graph.uncomposed if port is not None and (port.many or port.name == name) else ():
            if owner is node and any(f"'{each}'" in problem.what for each in (name, name.partition(".")[0])):
                given = shlex.quote(redact_text(f"{stage}{name}={value}"))
                problem.hints = (f"--input {given}", *problem.hints)
    return node


class Sources:
    """Finds sources for the ports of one request's steps, adding the steps that configs ask for to the graph."""

    def __init__(
        self,
        request: Request,
        graph: Graph,
        describe_input: DescribeInput,
        asked: Sequence[tuple[Goal, Node]],
        newest: Newest,
    ) -> None:
        """`asked`: the steps asked for."""
        self.request = request
        self.graph = graph
        self.types = graph.types
        self.asked = asked
        self.taken: dict[str, str] = {}
        """STEP.PORT → the artifact that a source with `existing` came to, of which `notes` tell."""
        self.notes: list[str] = []
        self.pending: deque[tuple[Node, Goal | None]] = deque()
        """Steps that configs asked for and earlier stages that are read, whose own ports are still to be fed."""
        self._chain = Chain(graph.types)
        self._stages = {goal.name or "": node for goal, node in asked}
        self._earlier = {goal.name or "": goal for goal in request.goals if goal.earlier}
        self._used: set[str] = set()
        """`--input` targets that a step took."""
        self._shared: dict[tuple[str, str, tuple[str, ...]], Node] = {}
        """(step id, config name, overrides): named twice as a source, it is one node."""
        self._describe_input = describe_input
        self._newest = newest
        self._described: dict[tuple[str, str], SuppliedInput | StepsError] = {}

    def feed(self, node: Node, goal: Goal | None) -> None:
        """Find a source for every port of a step. `goal` is None for a step that a config asked for."""
        self._shared.setdefault((node.manifest.id, node.config_name or DEFAULT, node.overrides), node)
        if node.config.inputs:
            self._name_sources_of_config(node)
        ports = node.manifest.inputs
        for name in [*(goal.wired if goal is not None else ()), *node.config.inputs]:
            known = self.graph.registry.step(node.manifest.id).inputs.get(name)
            if name in ports or (known is not None and known.unless):  # it is named for other configs of the step
                continue
            where = (goal.where.get(name) if goal is not None else None) or node.config.origin(f"inputs.{name}")
            hints = (*did_you_mean(nearest(name, ports, 1)), f"steps show {node.manifest.id}")
            what, expected = f"{node.key} has no input '{name}'", " or ".join(ports) or "no inputs at all"
            self.graph.report(problems.UnknownPort(what, where=where, expected=expected, hints=hints))
        for port in node.manifest.consumes:
            try:
                source = self._find(node, port, goal)
                if source is not None:
                    node.inputs[port.name] = source
                elif port.required and node.composed and port.name not in node.failed:
                    raise self._missing(node, port, goal)
            except StepsError as error:
                node.failed.add(port.name)
                if isinstance(error, problems.PlanProblem):
                    error.chain = (*error.chain, node.at(port.name))
                    error.where = error.where or node.manifest.where_input(port.name)
                self.graph.report(error)
        if goal is not None:
            self._chain.add(node.key, node.manifest)

    def report_unused(self) -> None:
        """Report every `--input` that no step of the plan took."""
        nodes = [node for node in self.graph.nodes.values() if not node.inserted]
        known = {port for _, node in self.asked for port in node.manifest.inputs}
        if len(nodes) > 1:
            known |= {node.at(port) for node in nodes for port in node.manifest.inputs}
        for target, reference in self.request.inputs.items():
            if target in self._used or not self.asked:
                continue
            what = f"no step of the request has an input '{target}' under its config"
            close = [*meant(target, sorted(known))[:2]]
            if target in known:
                what = f"several steps have an input '{target}', and each is fed by another step"
                close = [name for name in sorted(known) if name.endswith(f".{target}")]
            hints = [f"--input {name}={reference}" for name in close]
            hints = hints or [f"steps show {self.asked[-1][1].manifest.id}"]
            expected, where = " or ".join(sorted(known)) or "no inputs at all", f"--input {target}={reference}"
            self.graph.report(problems.UnknownPort(what, where=where, expected=expected, hints=hints))

    def _name_sources_of_config(self, node: Node) -> None:
        """Give each artifact that a config names for a port that takes many, `{PORT: {NAME: source}}`, a port, where
        the request names nothing for it."""
        sources, named = dict(node.config.inputs), {name.partition(".")[0] for name in node.manifest.inputs}
        for port in node.manifest.consumes:
            own = sources.get(port.name)
            if port.many and isinstance(own, Mapping) and not own.keys() & {"step", "ref"}:
                del sources[port.name]
                sources |= {f"{port.name}.{name}": source for name, source in own.items()}
        for name in named - node.manifest.inputs.keys():
            sources.pop(name, None)
        node.manifest = with_named_ports(node.manifest, sources)
        node.config = replace(node.config, inputs=sources)

    def _find(self, node: Node, port: Consumes, goal: Goal | None) -> InputSource | None:
        """A port's source, None where nothing names one. StepsError for one that does not fit."""
        key = next(iter(port.bindings), "")
        value = node.config.flat.get(key)
        is_set = isinstance(value, str) and bool(value) and not is_placeholder(value)
        overridden = is_set and (node.config.origin(key) or "").startswith("override")
        wired = goal.wired.get(port.name) if goal is not None else None
        candidates = self._chain.candidates(port) if goal is not None and self.request.chained else []
        of_config = node.config.inputs.get(port.name)
        fed = bool(candidates) or (wired is not None and wired.stage not in self._earlier)
        reference = self._given(node, port, goal, fed)
        where = None if reference is None else f"--input {port.name}={reference}"
        if port.many:  # it is here where no artifact has a name, and each needs one
            if reference is None and wired is None and of_config is None:
                return None
            what = f"'{port.name}' of {node.key} takes several artifacts, each under a name"
            raise problems.UnknownPort(what, where=where, expected=f"--input {port.name}.NAME={reference or 'REF'}")
        if reference is not None and overridden:
            asked = f"--input {shlex.quote(f'{port.name}={reference}')}"
            what, where = f"'{port.name}' of {node.key} is given twice", f"override '{key}={value}'"
            raise problems.AmbiguousSource(what, where=where, hints=(f"{asked}   # without the override",))
        if reference is not None:
            return self._supplied(node, port, reference, where)
        if overridden:
            return self._supplied(node, port, str(value), node.config.origin(key), key)
        if wired is not None and goal is not None:
            return self._from_stage(node, port, wired, goal.where.get(port.name))
        if len(candidates) > 1:
            hint = f"--input {self._target(node, port.name)}=PATH"
            raise _ambiguous(node, port, [self.graph.label(each) for each, _ in candidates], None, [hint])
        if candidates:
            return self._fit(node, port, *candidates[0], None)
        by_variable = is_set and bool(node.config.variables.get(key))
        if of_config is not None and not by_variable:
            return self._from_config(node, port, of_config, node.config.origin(f"inputs.{port.name}"))
        return self._supplied(node, port, str(value), node.config.origin(key), key) if is_set else None

    def _given(self, node: Node, port: Consumes, goal: Goal | None, fed: bool) -> str | None:
        """The reference that an `--input` gives a port; one without a step is for every step asked for that nothing
        else of the request would feed."""
        for target in (node.at(port.name), f"{node.manifest.id}.{port.name}", port.name):
            if target not in self.request.inputs or (target == port.name and goal is None):
                continue
            if target == port.name and fed and sum(target in each.manifest.inputs for _, each in self.asked) > 1:
                continue
            self._used.add(target)
            return self.request.inputs[target]
        return None

    def _supplied(self, node: Node, port: Consumes, ref: str, where: str | None, key: str = "") -> InputSource:
        """What the user gave, by `--input` or at a config key, looked at once."""
        if (ref, port.type) not in self._described:
            problem: StepsError | None
            try:
                described = self._describe_input(ref, port.type)
                self._described[ref, port.type], problem = described, described.absent
            except StepsError as error:
                self._described[ref, port.type] = problem = error
            if problem is not None:
                more = [f"export {name}=PATH" for name in node.config.variables.get(key, ())]
                problem.where, problem.hints = problem.where or where, (*more, *problem.hints)
                self.graph.report(problem)
        found = self._described[ref, port.type]
        if isinstance(found, StepsError):
            raise found
        if key:
            found = replace(found, ref=ref, config_key=key, absent=None)
        return self._fit(node, port, found, found.type, where)

    def _from_stage(self, node: Node, port: Consumes, wired: StageSource, where: str | None) -> InputSource | None:
        if wired.ref is not None:
            return self._supplied(node, port, wired.ref, where)
        name = wired.stage or ""
        producer, goal = self._stages.get(name), self._earlier.get(name)
        if producer is None and goal is not None:  # before the first stage asked for: it is planned once it is read
            producer = add_goal(goal, self.request, self.graph, f"an earlier stage of {self.request.name}")
            if producer is not None:
                self._stages[name] = producer
                self.pending.append((producer, goal))
        if producer is None:  # its step is unknown, which was reported
            node.failed.add(port.name)
            return None
        return self._from_step(node, port, producer, wired.port, where)

    def _from_config(self, node: Node, port: Consumes, source: Any, where: str | None) -> InputSource:
        """`inputs: {PORT: {step: ID, config: NAME, overrides: [...], port: NAME, existing: HOW}}`, or a reference."""
        if isinstance(source, str):
            return self._supplied(node, port, source, where)
        if (
            not isinstance(source, Mapping)
            or ("step" in source) == ("ref" in source)
            or set(source) - _SOURCE_KEYS
            or not isinstance(source.get("overrides"), str | list | tuple | None)
            or source.get("existing") not in (_EXISTING if "step" in source else (None,))
        ):
            what = f"the config's source for '{port.name}' of {node.key} cannot be read"
            form = "{step: ID, config: NAME, overrides: [...], port: PORT, existing: prefer|require}, {ref: REF}, REF"
            raise problems.UnknownPort(what, where=where, expected=form, found=str(source))
        if "ref" in source:
            return self._supplied(node, port, str(source["ref"]), where)
        manifest = self.graph.find_step(str(source["step"]), where)
        given = source.get("overrides") or ()
        if source.get("existing") is not None and not given:
            ref = self._left_before(node, port, source, manifest)
            if ref is not None:
                return self._supplied(node, port, ref, where)
        config_name = None if source.get("config") is None else str(source["config"])
        overrides = (given,) if isinstance(given, str) else tuple(str(item) for item in given)
        identity = (manifest.id, config_name or DEFAULT, overrides)
        if identity not in self._shared:
            because = f"source of {node.at(port.name)}"
            self._shared[identity] = self.graph.add(manifest.id, manifest, config_name, overrides, because)
            self.pending.append((self._shared[identity], None))
        return self._from_step(node, port, self._shared[identity], source.get("port"), where)

    def _left_before(self, node: Node, port: Consumes, source: Mapping[str, Any], manifest: StepManifest) -> str | None:
        """What an earlier run of a config's source left. MissingInput where a required one is not here."""
        config_name = str(source.get("config") or DEFAULT)
        of, target = f"{manifest.id} -c {config_name}", self._target(node, port.name)
        for output in manifest.outputs:
            ref = self._newest(manifest.id, config_name, output) if source.get("port") in (None, output) else None
            if ref is not None:
                self.taken[node.at(port.name)] = ref
                newest = f"{port.name} of {node.key} is {ref}, the newest that {of} left here"
                self.notes.append(f"{newest}; --input {target}=REF takes another")
                return ref
        if source["existing"] == "prefer":
            return None
        raise problems.MissingInput(
            f"'{port.name}' of {node.key} is made by {of}, which has made none in this home",
            chain=(of,),
            where=node.config.origin(f"inputs.{port.name}"),
            expected=_described(port),
            found="none in this home",
            hints=(f"steps run {of}", f"--input {target}=PATH"),
        )

    def _from_step(
        self, node: Node, port: Consumes, producer: Node, output: str | None, where: str | None
    ) -> InputSource:
        """The output of a named step: the one named, else the one that fits with the fewest conversions."""
        outputs = producer.manifest.outputs
        if output is not None and output not in outputs:
            what, expected = f"{producer.key} has no output '{output}'", " or ".join(outputs)
            hints = did_you_mean(nearest(output, outputs, 1))
            raise problems.UnknownPort(what, where=where, expected=expected, found=output, hints=hints)
        names = list(outputs) if output is None else [output]
        paths = {name: self.types.path(outputs[name].type, port.type) for name in names}
        fewest = min((len(path) for path in paths.values() if path is not None), default=None)
        if fewest is None:
            label = producer.at(names[0]) if len(names) == 1 else producer.key
            raise self._mismatch(node, port, label, [outputs[name].type for name in names], where)
        best = [name for name, path in paths.items() if path is not None and len(path) == fewest]
        if len(best) > 1:
            wirings = [f'{port.name} = "{producer.key}.{name}"' for name in best]
            raise _ambiguous(node, port, [producer.at(name) for name in best], where, wirings)
        return self._fit(node, port, StepOutput(producer.key, best[0]), outputs[best[0]].type, where)

    def _fit(
        self, node: Node, port: Consumes, source: InputSource, found: str | None, where: str | None
    ) -> InputSource:
        """The source, or the end of a chain of conversions to the port's type."""
        if found is None:
            return source
        path = self.types.path(found, port.type)
        if path is None:
            raise self._mismatch(node, port, self.graph.label(source), [found], where)
        return self.graph.convert(source, path, node, port.name)

    def _mismatch(
        self, node: Node, port: Consumes, label: str, found: Sequence[str], where: str | None
    ) -> problems.PlanProblem:
        """What is fed to a port is not of its type, and no conversion leads there."""
        shown = " or ".join(found) or "no output at all"
        wider = [name for name in found if self.types.is_a(port.type, name)]
        what = f"'{port.name}' of {node.key} cannot take {shown}"
        if wider:
            what = f"'{port.name}' of {node.key} needs {port.type}, and not every {wider[0]} is one"
        kind = problems.WrongDirection if wider else problems.TypeMismatch
        expected = port.type + (f": rows like {problems.ROWS[port.type]}" if port.type in problems.ROWS else "")
        hints = self._made_by(node, port)
        return kind(what, chain=(label,), where=where, expected=expected, found=shown, hints=hints)

    def _missing(self, node: Node, port: Consumes, goal: Goal | None) -> problems.PlanProblem:
        """Nothing feeds a required port."""
        hints = [f"--input {self._target(node, port.name)}{'.NAME' if port.many else ''}=PATH"]
        if goal is not None and port.bindings and not port.many:
            stage = "" if self.request.chained else f"{node.key}."
            hints.append(f"{stage}{next(iter(port.bindings))}=PATH")
        hints += self._made_by(node, port) if self.request.chained else []
        what, found = (
            f"nothing feeds '{port.name}' of {node.key}",
            "no --input, no earlier step, no source in the config",
        )
        return problems.MissingInput(what, expected=_described(port), found=found, hints=hints)

    def _made_by(self, node: Node, port: Consumes) -> list[str]:
        """To paste: steps that make what a port takes, first those that make it of something else. Converters are left
        out: they are inserted where they help."""
        types = self.types
        converters = {step for each in types.types.values() for step in (each.convert_to or {}).values()}
        found = []
        for step, manifest in self.graph.registry.steps.items():
            makes_of_it = any(each.required and types.is_a(each.type, port.type) for each in manifest.consumes)
            for output in manifest.produces:
                if types.is_a(output.type, port.type) and step not in converters:
                    found.append((makes_of_it, types.ancestors(output.type).index(port.type), step))
        steps = list(dict.fromkeys(step for _, _, step in sorted(found)))[:2]
        return [f"steps plan {step} {node.manifest.id}" for step in steps if step != node.manifest.id]

    def _target(self, node: Node, port: str) -> str:
        """How `--input` names a port: bare where only one of the steps asked for has it and is not wired to another."""
        owners = [each for goal, each in self.asked if port in each.manifest.inputs and port not in goal.wired]
        return port if owners == [node] else node.at(port)


def _ambiguous(
    node: Node, port: Consumes, labels: Sequence[str], where: str | None, hints: Sequence[str]
) -> problems.PlanProblem:
    what, labelled = f"several outputs could feed '{port.name}' of {node.key}", (" or ".join(labels),)
    return problems.AmbiguousSource(what, chain=labelled, where=where, expected=f"one {port.type}", hints=hints)


def _described(port: Consumes) -> str:
    return port.type + (f" ({port.description.strip().rstrip('.')})" if port.description else "")
