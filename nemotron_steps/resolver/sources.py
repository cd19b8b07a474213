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
from nemotron_steps.resolver.checks import is_placeholder
from nemotron_steps.resolver.graph import DEFAULT, Graph, Node
from nemotron_steps.resolver.plan import InputSource, StepOutput, SuppliedInput
from nemotron_steps.resolver.problems import (
    ROWS,
    AmbiguousSource,
    MissingInput,
    PlanProblem,
    TypeMismatch,
    UnknownPort,
    WrongDirection,
)
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
    manifest = graph.find_step(goal.step_id, goal.where.get(""))
    if manifest is None:
        return None
    key = goal.name or manifest.id
    named = [target.removeprefix(f"{key}.").removeprefix(f"{manifest.id}.") for target in request.inputs]
    ported = with_named_ports(manifest, [*goal.wired, *named])
    node = graph.add(key, ported, goal.config_name, goal.overrides, because)
    node.earlier, node.instance, node.checks = goal.earlier, goal.instance, goal.checks
    stage = "" if len(request.goals) == 1 else f"{goal.instance.stage if goal.instance else key}."
    for override in goal.overrides:
        name, _, value = override.lstrip("+").partition("=")
        for owner, problem in graph.uncomposed:
            if owner is node and name.partition(".")[0] in manifest.inputs and f"'{name}'" in problem.what:
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
        self.chain = Chain(graph.types)
        self.asked = asked
        self.stages = {goal.name: node for goal, node in asked if goal.name is not None}
        self.wired = {node.key: frozenset(goal.wired) for goal, node in asked}
        self.used: set[str] = set()
        """`--input` targets that a step took."""
        self.taken: dict[str, str] = {}
        """STEP.PORT → the artifact that a source with `existing` came to, of which `notes` tell."""
        self.notes: list[str] = []
        self.pending: deque[tuple[Node, Goal | None]] = deque()
        """Steps that configs asked for and earlier stages that are read, whose own ports are still to be fed."""
        self._earlier = {goal.name: goal for goal in request.goals if goal.earlier}
        self._shared: dict[tuple[str, str, tuple[str, ...]], Node] = {}
        """(step id, config name, overrides): named twice as a source, it is one node."""
        self._describe_input = describe_input
        self._newest = newest
        self._described: dict[tuple[str, str], SuppliedInput | None] = {}

    def report_unused(self) -> None:
        """Report every `--input` that no step of the plan took."""
        nodes = [node for node in self.graph.nodes.values() if not node.inserted]
        known = [port for _, node in self.asked for port in node.manifest.inputs]
        known += [node.at(port) for node in nodes for port in node.manifest.inputs] if len(nodes) > 1 else []
        known = sorted(set(known))
        for target, reference in self.request.inputs.items():
            if target in self.used or not self.asked:
                continue
            what = f"no step of the request has an input '{target}' under its config"
            close = meant(target, known)[:2]
            if target in known:
                what = f"several steps have an input '{target}', and each is fed by another step"
                close = [name for name in known if name.endswith(f".{target}")]
            self.graph.report(
                UnknownPort(
                    what,
                    where=f"--input {target}={reference}",
                    expected=" or ".join(known) or "no inputs at all",
                    found=target,
                    hints=[f"--input {name}={reference}" for name in close]
                    or [f"steps show {node.manifest.id}" for _, node in self.asked[-1:]],
                )
            )

    def _given(self, node: Node, port: Consumes, goal: Goal | None) -> str | None:
        """The reference that an `--input` gives a port; one without a step is for every step asked for that nothing
        else of the request would feed."""
        for target in (node.at(port.name), f"{node.manifest.id}.{port.name}"):
            if target in self.request.inputs:
                self.used.add(target)
                return self.request.inputs[target]
        if goal is None or port.name not in self.request.inputs:
            return None
        wired = goal.wired.get(port.name)
        fed = (wired is not None and wired.stage not in self._earlier) or self._in_chain(port) != []
        if fed and sum(port.name in each.manifest.inputs for _, each in self.asked) > 1:
            return None
        self.used.add(port.name)
        return self.request.inputs[port.name]

    def _in_chain(self, port: Consumes) -> list[tuple[StepOutput, str]]:
        return self.chain.candidates(port) if self.request.chained else []

    def feed(self, node: Node, goal: Goal | None) -> None:
        """Find a source for every port of a step. `goal` is None for a step that a config asked for."""
        self._shared.setdefault((node.manifest.id, node.config_name or DEFAULT, node.overrides), node)
        if node.config.inputs:
            self._name_sources_of_config(node)
        wired = goal.wired if goal is not None else {}
        for name in [*wired, *node.config.inputs]:
            port = self.graph.registry.step(node.manifest.id).inputs.get(name)
            is_idle = port is not None and port.unless  # it is named for other configs of the step
            if name not in node.manifest.inputs and not is_idle:
                where = goal.where.get(name) if goal is not None and name in wired else None
                self._unknown_input(node, name, where or node.config.origin(f"inputs.{name}"))
        for port in node.manifest.consumes:
            source = self._find(node, port, goal)
            if source is not None:
                node.inputs[port.name] = source
            elif port.required and port.name not in node.failed and node.composed:
                self._missing(node, port, goal)
        if goal is not None:
            self.chain.add(node.key, node.manifest)

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
        key = next(iter(port.bindings), "")
        value = node.config.flat.get(key)
        is_set = isinstance(value, str) and bool(value) and not is_placeholder(value)
        overridden = is_set and (node.config.origin(key) or "").startswith("override")
        reference = self._given(node, port, goal)
        wired = goal.wired.get(port.name) if goal is not None else None
        of_config = node.config.inputs.get(port.name)
        where = None if reference is None else f"--input {port.name}={reference}"
        if port.many:  # it is here where no artifact has a name, and each needs one
            if reference is None and wired is None and of_config is None:
                return None
            what = f"'{port.name}' of {node.key} takes several artifacts, each under a name"
            named = f"--input {port.name}.NAME={reference or 'REF'}"
            return self._fail(node, port, UnknownPort, what, where, expected=named, found="no name")
        if reference is not None and overridden:
            asked, override = f"--input {shlex.quote(f'{port.name}={reference}')}", f"{key}={value}"
            return self._fail(
                node,
                port,
                AmbiguousSource,
                f"'{port.name}' of {node.key} is given twice",
                f"override '{override}'",
                expected="one of them",
                found=f"{asked} and {override}",
                hints=(f"{asked}   # without the override",),
            )
        if reference is not None:
            return self._from_reference(node, port, reference, where)
        if overridden:
            return self._from_config_key(node, port, key, str(value))
        if goal is not None and wired is not None:
            return self._from_stage(node, port, wired, goal.where.get(port.name))
        candidates = [] if goal is None else self._in_chain(port)
        if len(candidates) > 1:
            hint = f"--input {self._target(node, port.name)}=PATH"
            return self._ambiguous(node, port, [self.graph.label(each) for each, _ in candidates], None, [hint])
        if candidates:
            return self._fit(node, port, *candidates[0], None)
        by_variable = is_set and bool(node.config.variables.get(key))
        if of_config is not None and not by_variable:
            return self._from_config_source(node, port, of_config)
        return self._from_config_key(node, port, key, str(value)) if is_set else None

    # -- kinds of source --------------------------------------------------------------------------------------

    def _from_reference(self, node: Node, port: Consumes, ref: str, where: str | None) -> InputSource | None:
        supplied = self._describe(node, port, ref, where)
        return None if supplied is None else self._fit(node, port, supplied, supplied.type, where)

    def _from_config_key(self, node: Node, port: Consumes, key: str, value: str) -> InputSource | None:
        where = node.config.origin(key)
        more = [f"export {name}=PATH" for name in node.config.variables.get(key, ())]
        supplied = self._describe(node, port, value, where, *more)
        if supplied is None:
            return None
        described = replace(supplied, ref=value, config_key=key, absent=None)
        return self._fit(node, port, described, described.type, where)

    def _from_stage(self, node: Node, port: Consumes, wired: StageSource, where: str | None) -> InputSource | None:
        if wired.ref is not None:
            return self._from_reference(node, port, wired.ref, where)
        name = wired.stage or ""
        producer, goal = self.stages.get(name), self._earlier.get(name)
        if producer is None and goal is not None:  # before the first stage asked for: it is planned once it is read
            producer = add_goal(goal, self.request, self.graph, f"an earlier stage of {self.request.name}")
            if producer is not None:
                self.stages[name] = producer
                self.wired[name] = frozenset(goal.wired)
                self.pending.append((producer, goal))
        if producer is None:  # its step is unknown, which was reported
            node.failed.add(port.name)
            return None
        return self._from_step(node, port, producer, wired.port, where)

    def _from_config_source(self, node: Node, port: Consumes, source: Any) -> InputSource | None:
        """`inputs: {PORT: {step: ID, config: NAME, overrides: [...], port: NAME, existing: HOW}}`, or a reference."""
        where = node.config.origin(f"inputs.{port.name}")
        if isinstance(source, str):
            return self._from_reference(node, port, source, where)
        if (
            not isinstance(source, Mapping)
            or ("step" in source) == ("ref" in source)
            or set(source) - _SOURCE_KEYS
            or not isinstance(source.get("overrides"), str | list | tuple | None)
            or source.get("existing") not in (_EXISTING if "step" in source else (None,))
        ):
            what = f"the config's source for '{port.name}' of {node.key} cannot be read"
            form = (
                "{step: ID, config: NAME, overrides: [...], port: PORT, existing: prefer|require}, {ref: REF}, or REF"
            )
            return self._fail(node, port, UnknownPort, what, where, expected=form, found=str(source))
        if "ref" in source:
            return self._from_reference(node, port, str(source["ref"]), where)
        manifest = self.graph.find_step(str(source["step"]), where)
        if manifest is None:
            node.failed.add(port.name)
            return None
        given = source.get("overrides") or ()
        if source.get("existing") is not None and not given:
            ref = self._left_before(node, port, source, manifest)
            if ref is not None or port.name in node.failed:
                return None if ref is None else self._from_reference(node, port, ref, where)
        config_name = None if source.get("config") is None else str(source["config"])
        overrides = (given,) if isinstance(given, str) else tuple(str(item) for item in given)
        identity = (manifest.id, config_name or DEFAULT, overrides)
        producer = self._shared.get(identity)
        if producer is None:
            because = f"source of {node.at(port.name)}"
            producer = self.graph.add(manifest.id, manifest, config_name, overrides, because)
            self._shared[identity] = producer
            self.pending.append((producer, None))
        return self._from_step(node, port, producer, source.get("port"), where)

    def _left_before(self, node: Node, port: Consumes, source: Mapping[str, Any], manifest: StepManifest) -> str | None:
        """What an earlier run of a config's source left; None after reporting that a required one is not here."""
        config_name = str(source.get("config") or DEFAULT)
        of = f"{manifest.id} -c {config_name}"
        target = self._target(node, port.name)
        for output in manifest.outputs:
            ref = self._newest(manifest.id, config_name, output) if source.get("port") in (None, output) else None
            if ref is not None:
                self.taken[node.at(port.name)] = ref
                newest = f"{port.name} of {node.key} is {ref}, the newest that {of} left here"
                self.notes.append(f"{newest}; --input {target}=REF takes another")
                return ref
        if source["existing"] == "require":
            self._fail(
                node,
                port,
                MissingInput,
                f"'{port.name}' of {node.key} is made by {of}, which has made none in this home",
                node.config.origin(f"inputs.{port.name}"),
                source=of,
                expected=_described(port),
                found="none in this home",
                hints=(f"steps run {of}", f"--input {target}=PATH"),
            )
        return None

    def _from_step(
        self, node: Node, port: Consumes, producer: Node, output: str | None, where: str | None
    ) -> InputSource | None:
        """The output of a named step: the one named, else the one that fits with the fewest conversions."""
        outputs = producer.manifest.outputs
        if output is not None and output not in outputs:
            return self._fail(
                node,
                port,
                UnknownPort,
                f"{producer.key} has no output '{output}'",
                where,
                source=producer.at(output),
                expected=" or ".join(outputs) or "a step that produces something",
                found=output,
                hints=did_you_mean(nearest(output, outputs, 1)),
            )
        names = list(outputs) if output is None else [output]
        paths = {name: self.types.path(outputs[name].type, port.type) for name in names}
        fewest = min((len(path) for path in paths.values() if path is not None), default=None)
        if fewest is None:
            label = producer.at(names[0]) if len(names) == 1 else producer.key
            return self._mismatch(node, port, label, [outputs[name].type for name in names], where)
        best = [name for name, path in paths.items() if path is not None and len(path) == fewest]
        if len(best) > 1:
            wirings = [f'{port.name} = "{producer.key}.{name}"' for name in best]
            return self._ambiguous(node, port, [producer.at(name) for name in best], where, wirings)
        return self._fit(node, port, StepOutput(producer.key, best[0]), outputs[best[0]].type, where)

    def _fit(
        self, node: Node, port: Consumes, source: InputSource, found: str | None, where: str | None
    ) -> InputSource | None:
        """The source, or the end of a chain of conversions to the port's type; None after reporting a mismatch."""
        if found is None:
            return source
        path = self.types.path(found, port.type)
        if path is None:
            return self._mismatch(node, port, self.graph.label(source), [found], where)
        return self.graph.convert(source, path, node, port.name)

    def _describe(self, node: Node, port: Consumes, ref: str, where: str | None, *more: str) -> SuppliedInput | None:
        key = (ref, port.type)
        if key not in self._described:
            found = None
            problem: StepsError | None
            try:
                found = self._describe_input(ref, port.type)
                problem = found.absent
            except StepsError as error:
                problem = error
            if problem is not None:
                problem.where = problem.where or where
                problem.hints = (*more, *problem.hints)
                self.graph.report(problem)
            self._described[key] = found
        if self._described[key] is None:
            node.failed.add(port.name)
        return self._described[key]

    # -- what is wrong ----------------------------------------------------------------------------------------

    def _fail(
        self,
        node: Node,
        port: Consumes,
        kind: type[PlanProblem],
        what: str,
        where: str | None = None,
        *,
        source: str | None = None,
        **said: Any,
    ) -> InputSource | None:
        """Report that a port has no source. `source`: what stands before it in the chain."""
        chain = [] if source is None else [source]
        place = where or node.manifest.where_input(port.name)
        self.graph.report(kind(what, chain=[*chain, node.at(port.name)], where=place, **said))
        node.failed.add(port.name)
        return None

    def _mismatch(
        self, node: Node, port: Consumes, label: str, found: Sequence[str], where: str | None
    ) -> InputSource | None:
        """What is fed to a port is not of its type, and no conversion leads there."""
        shown = " or ".join(found) or "no output at all"
        wider = [name for name in found if self.types.is_a(port.type, name)]
        what = f"'{port.name}' of {node.key} cannot take {shown}"
        if wider:
            what = f"'{port.name}' of {node.key} needs {port.type}, and not every {wider[0]} is one"
        return self._fail(
            node,
            port,
            WrongDirection if wider else TypeMismatch,
            what,
            where,
            source=label,
            expected=port.type + (f": rows like {ROWS[port.type]}" if port.type in ROWS else ""),
            found=shown,
            hints=self._made_by(node, port),
        )

    def _ambiguous(
        self, node: Node, port: Consumes, labels: Sequence[str], where: str | None, hints: Sequence[str]
    ) -> InputSource | None:
        return self._fail(
            node,
            port,
            AmbiguousSource,
            f"several outputs could feed '{port.name}' of {node.key}",
            where,
            source=" or ".join(labels),
            expected=f"one {port.type}",
            found=", ".join(labels),
            hints=hints,
        )

    def _unknown_input(self, node: Node, name: str, where: str | None) -> None:
        ports = node.manifest.inputs
        self.graph.report(
            UnknownPort(
                f"{node.key} has no input '{name}'",
                chain=(node.at(name),),
                where=where or node.manifest.where("step", "id"),
                expected=" or ".join(ports) or "no inputs at all",
                found=name,
                hints=(*did_you_mean(nearest(name, ports, 1)), f"steps show {node.manifest.id}"),
            )
        )

    def _missing(self, node: Node, port: Consumes, goal: Goal | None) -> None:
        """Nothing feeds a required port."""
        hints = [f"--input {self._target(node, port.name)}{'.NAME' if port.many else ''}=PATH"]
        if goal is not None and port.bindings and not port.many:
            stage = "" if self.request.chained else f"{node.key}."
            hints.append(f"{stage}{next(iter(port.bindings))}=PATH")
        hints += self._made_by(node, port) if self.request.chained else []
        found = "no --input, no earlier step, no source in the config"
        what = f"nothing feeds '{port.name}' of {node.key}"
        self._fail(node, port, MissingInput, what, expected=_described(port), found=found, hints=hints)

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
        owners = [n.key for _, n in self.asked if port in n.manifest.inputs and port not in self.wired[n.key]]
        return port if owners == [node.key] else node.at(port)


def _described(port: Consumes) -> str:
    return port.type + (f" ({port.description.strip().rstrip('.')})" if port.description else "")
