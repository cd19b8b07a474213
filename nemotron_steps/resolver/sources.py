"""Where a port's artifact comes from, and whether it fits. First that applies:

1. `--input PORT=REF` (or `STEP.PORT=REF`), or an override that sets the port's config key; both are a contradiction
2. the wiring of a pipeline file
3. in a plain list of steps, the nearest earlier step with an output the port accepts, directly or through conversions
   (for an optional port: directly only); of that step's outputs the one with the fewest conversions, and two equally
   good ones are ambiguous. A step that merely converted what the port accepts as it was is looked through
4. an environment variable that the port's config key takes its value from, where it is set
5. the config's own `inputs` section: a step to run first, what an earlier run of one left, or a reference
6. a value already at the port's config key
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nemotron_steps.config.names import nearest
from nemotron_steps.errors import StepsError, did_you_mean
from nemotron_steps.manifest.models import Consumes, StepManifest
from nemotron_steps.manifest.pipeline_models import StageSource
from nemotron_steps.manifest.typegraph import TypeGraph
from nemotron_steps.resolver import hints
from nemotron_steps.resolver.config_checks import is_placeholder
from nemotron_steps.resolver.graph import DEFAULT, Graph, Identity, Node
from nemotron_steps.resolver.input_binding import with_named_ports, with_sources_of_config
from nemotron_steps.resolver.plan import InputSource, StepOutput, SuppliedInput
from nemotron_steps.resolver.problems import UnknownPort
from nemotron_steps.resolver.request import DescribeInput, Goal, Newest, Request

_SOURCE_KEYS = frozenset({"step", "config", "overrides", "port", "existing", "ref"})
_EXISTING = (None, "prefer", "require")
"""Of a step that a config names as a source: run it; take the newest that it left in the home under that config, else
run it; or take that and never run it. One with `overrides` is always run: they say what is wanted."""


@dataclass(frozen=True)
class Produced:
    """An output of an earlier step of the list."""

    source: StepOutput
    type: str


@dataclass
class Chain:
    """The outputs of the steps of a list so far."""

    types: TypeGraph
    steps: list[tuple[Produced, ...]] = field(default_factory=list)
    """Outputs of each step, in order."""
    latest: dict[str, int] = field(default_factory=dict)
    """Type → position of the latest step with an output of exactly that type."""
    converted_from: dict[str, tuple[InputSource, str]] = field(default_factory=dict)
    """Key of a step of the list that only converts → what it converts, and its type."""

    def add(self, key: str, manifest: StepManifest) -> None:
        """Append a step's outputs."""
        self.latest.update(dict.fromkeys((port.type for port in manifest.produces), len(self.steps)))
        self.steps.append(tuple(Produced(StepOutput(key, port.name), port.type) for port in manifest.produces))

    def candidates(self, port: Consumes) -> list[Produced]:
        """The best outputs for a port: empty if there is none, more than one if it is ambiguous."""
        if port.auto is False:
            return []
        leading = self.types.leading_to(port.auto if isinstance(port.auto, str) else port.type)
        most = len(leading) if port.required else 0  # conversions; an optional port is fed directly or not at all
        # Looked up by type, as lists may be long.
        nearest_step = max((self.latest.get(name, -1) for name, hops in leading.items() if hops <= most), default=-1)
        if nearest_step < 0:
            return []
        usable = [each for each in self.steps[nearest_step] if leading.get(each.type, most + 1) <= most]
        fewest = min(leading[each.type] for each in usable)
        return [each for each in usable if leading[each.type] == fewest]

    def look_through(self, produced: Produced, port: Consumes) -> tuple[InputSource, str]:
        """The source to use for an output: what it was converted from, when the port accepts that as it is."""
        if not self.types.is_a(produced.type, port.type):
            before = self.converted_from.get(produced.source.step_key)
            if before is not None and self.types.is_a(before[1], port.type):
                return before
        return produced.source, produced.type


class Sources:
    """Finds sources for the ports of one request's steps, adding the steps that configs ask for to the graph."""

    def __init__(
        self,
        request: Request,
        graph: Graph,
        describe_input: DescribeInput,
        goals: Sequence[tuple[Goal, Node]],
        supplied: Mapping[tuple[str, str], str],
        newest: Newest = lambda step_id, config_name, port: None,
    ) -> None:
        """`goals`: the steps asked for; `supplied`: (node key, port) → reference of a bare `--input`."""
        self.request = request
        self.graph = graph
        self.types = graph.types
        self.chain = Chain(graph.types)
        self.goals = [node for _, node in goals]
        self.positions = {node.key: position for position, node in enumerate(self.goals)}
        self.stages = {goal.name: node for goal, node in goals if goal.name is not None}
        self.wired = {node.key: frozenset(goal.wired) for goal, node in goals}
        self.supplied = supplied
        self.used: set[str] = set()
        """`--input STEP.PORT` targets that a step took."""
        self.taken: dict[str, str] = {}
        """STEP.PORT → the artifact that a source with `existing` came to, of which `notes` tell."""
        self.notes: list[str] = []
        self.pending: deque[tuple[Node, Goal | None]] = deque()
        """Steps that configs asked for and earlier stages that are read, whose own ports are still to be fed."""
        self._earlier = {goal.name: goal for goal in request.goals if goal.earlier}
        self._converters = {step for t in graph.types.types.values() for step in (t.convert_to or {}).values()}
        self._shared: dict[Identity, Node] = {}
        self._describe_input = describe_input
        self._newest = newest
        self._described: dict[tuple[str, str], SuppliedInput | None] = {}

    def feed(self, node: Node, goal: Goal | None) -> None:
        """Find a source for every port of a step. `goal` is None for a step that a config asked for."""
        # From here on a config that names the same step, config and overrides means this node.
        self._shared.setdefault(node.identity, node)
        if node.config is not None and node.config.inputs:
            node.manifest, of_config = with_sources_of_config(node.manifest, node.config.inputs)
            if of_config != node.config.inputs:
                node.config = replace(node.config, inputs=of_config)
        wired = goal.wired if goal is not None else {}
        named = node.config.inputs if node.config is not None else {}
        for name in [*wired, *named]:
            port = self.graph.registry.step(node.manifest.id).inputs.get(name)
            is_idle = port is not None and port.unless  # it is named for other configs of the step
            if name not in node.manifest.inputs and not is_idle:
                where = goal.where.get(name) if goal is not None and name in wired else None
                where = where or (node.config.where(f"inputs.{name}") if node.config is not None else None)
                self.graph.report(hints.unknown_input(node, name, where))
        missing = []
        for port in node.manifest.consumes:
            source = self._find(node, port, goal)
            if source is not None:
                node.inputs[port.name] = source
            elif port.required and port.name not in node.failed and node.config is not None:
                missing.append(port)
        if missing:
            self._report_missing(node, missing, goal)

    def _find(self, node: Node, port: Consumes, goal: Goal | None) -> InputSource | None:
        reference = self._supplied(node, port.name)
        if port.many:  # it is here where no artifact has a name, and each needs one
            self._report_unnamed(node, port, reference, goal)
            return None
        bound = self._bound_value(node, port)
        set_by = node.config.where(bound[0]) if bound is not None and node.config is not None else None
        overridden = bound is not None and (set_by or "").startswith("override")
        if reference is not None:
            if bound is not None and overridden:
                node.failed.add(port.name)
                self.graph.report(hints.two_sources(node, port, reference, "=".join(bound)))
                return None
            return self._from_reference(node, port, reference, f"--input {port.name}={reference}")
        if bound is not None and overridden:
            return self._from_config_key(node, port, *bound)
        if goal is not None and port.name in goal.wired:
            return self._from_stage(node, port, goal.wired[port.name], goal.where.get(port.name))
        if goal is not None and self.request.chained:
            source = self._from_chain(node, port)
            if source is not None or port.name in node.failed:
                return source
        by_variable = bound is not None and node.config is not None and bool(node.config.variables.get(bound[0]))
        if node.config is not None and node.config.inputs.get(port.name) is not None and not by_variable:
            return self._from_config_source(node, port, node.config.inputs[port.name])
        return self._from_config_key(node, port, *bound) if bound is not None else None

    def extend_chain(self, node: Node) -> None:
        """Make a fed step's outputs available to the steps after it in a plain list."""
        self.chain.add(node.key, node.manifest)
        if node.manifest.id in self._converters:
            entrances = [port.name for port in node.manifest.consumes if port.required and port.name in node.inputs]
            found = self.graph.type_of(node.inputs[entrances[0]]) if len(entrances) == 1 else None
            if found is not None:
                self.chain.converted_from[node.key] = (node.inputs[entrances[0]], found)

    def _supplied(self, node: Node, port: str) -> str | None:
        for step in (node.key, node.manifest.id):
            if f"{step}.{port}" in self.request.inputs:
                self.used.add(f"{step}.{port}")
                return self.request.inputs[f"{step}.{port}"]
        return self.supplied.get((node.key, port))

    # -- kinds of source --------------------------------------------------------------------------------------

    def _from_reference(self, node: Node, port: Consumes, ref: str, where: str | None) -> InputSource | None:
        supplied = self._describe(node, port, ref, where)
        return None if supplied is None else self._fit(node, port, supplied, supplied.type, where)

    def _from_config_key(self, node: Node, port: Consumes, key: str, value: str) -> InputSource | None:
        where = node.config.where(key) if node.config is not None else None
        variables = node.config.variables.get(key, ()) if node.config is not None else ()
        supplied = self._describe(node, port, value, where, *(f"export {name}=PATH" for name in variables))
        if supplied is None:
            return None
        described = replace(supplied, ref=value, config_key=key, absent=None)
        return self._fit(node, port, described, described.type, where)

    def _from_stage(self, node: Node, port: Consumes, wired: StageSource, where: str | None) -> InputSource | None:
        if wired.ref is not None:
            return self._from_reference(node, port, wired.ref, where)
        producer = self.stages.get(wired.stage or "") or self._earlier_stage(wired.stage or "")
        if producer is None:  # its step is unknown, which was reported
            node.failed.add(port.name)
            return None
        return self._from_step(node, port, producer, wired.port, where)

    def _from_config_source(self, node: Node, port: Consumes, source: Any) -> InputSource | None:
        """`inputs: {PORT: {step: ID, config: NAME, overrides: [...], port: NAME, existing: HOW}}`, or a reference."""
        where = node.config.where(f"inputs.{port.name}") if node.config is not None else None
        if isinstance(source, str):
            return self._from_reference(node, port, source, where)
        if (
            not isinstance(source, Mapping)
            or ("step" in source) == ("ref" in source)
            or set(source) - _SOURCE_KEYS
            or not isinstance(source.get("overrides"), str | list | tuple | None)
            or source.get("existing") not in (_EXISTING if "step" in source else (None,))
        ):
            node.failed.add(port.name)
            self.graph.report(
                UnknownPort(
                    f"the config's source for '{port.name}' of {node.key} cannot be read",
                    chain=(node.at(port.name),),
                    where=where,
                    expected="{step: STEP, config: NAME, overrides: [...], port: PORT, existing: prefer|require}, "
                    "{ref: REF}, or REF",
                    found=str(source),
                )
            )
            return None
        if "ref" in source:
            return self._from_reference(node, port, str(source["ref"]), where)
        if source.get("existing") is not None and not source.get("overrides"):
            ref = self._left_before(node, port, source, where)
            if ref is not None or port.name in node.failed:
                return None if ref is None else self._from_reference(node, port, ref, where)
        producer = self._source_step(node, port, source, where)
        if producer is None:
            node.failed.add(port.name)
            return None
        return self._from_step(node, port, producer, source.get("port"), where)

    def _left_before(self, node: Node, port: Consumes, source: Mapping[str, Any], where: str | None) -> str | None:
        """What an earlier run of a config's source left; None after reporting that a required one is not here."""
        manifest = self.graph.find_step(str(source["step"]), where)
        config_name = str(source.get("config") or DEFAULT)
        if manifest is None:
            node.failed.add(port.name)
            return None
        outputs = [name for name in manifest.outputs if source.get("port") in (None, name)]
        of = f"{manifest.id} -c {config_name}"
        for output in outputs:
            ref = self._newest(manifest.id, config_name, output)
            if ref is not None:
                self.taken[node.at(port.name)] = ref
                self.notes.append(
                    f"{port.name} of {node.key} is {ref}, the newest that {of} left here; "
                    f"--input {self._target(node, port.name)}=REF takes another"
                )
                return ref
        if source["existing"] == "require":
            node.failed.add(port.name)
            others = [ref for output in outputs if (ref := self._newest(manifest.id, None, output)) is not None]
            target = self._target(node, port.name)
            given = [f"--input {target}={ref}" for ref in (*others, "PATH")]
            what = f"'{port.name}' of {node.key} is made by {of}, which has made none in this home"
            problem = hints.missing(node, port, (f"steps run {of}", *given), what)
            problem.where, problem.chain, problem.found = where, (of, node.at(port.name)), "none in this home"
            self.graph.report(problem)
        return None

    def _source_step(self, node: Node, port: Consumes, source: Mapping[str, Any], where: str | None) -> Node | None:
        config_name = None if source.get("config") is None else str(source["config"])
        given = source.get("overrides") or ()
        overrides = (given,) if isinstance(given, str) else tuple(str(item) for item in given)
        identity = (str(source["step"]), config_name or DEFAULT, overrides)
        known = self._shared.get(identity)
        if known is None:
            manifest = self.graph.find_step(identity[0], where)
            if manifest is None:
                return None
            because = f"source of {node.at(port.name)}"
            known = self._shared[identity] = self.graph.add(manifest.id, manifest, config_name, overrides, because)
            self.pending.append((known, None))
        return known

    def _earlier_stage(self, name: str) -> Node | None:
        """A stage before the first one asked for, once something reads what it left."""
        goal = self._earlier.get(name)
        manifest = self.graph.find_step(goal.step_id, goal.where.get("")) if goal is not None else None
        if goal is None or manifest is None:
            return None
        manifest = with_named_ports(manifest, name, goal, self.request)
        because = f"an earlier stage of {self.request.name}"
        node = self.stages[name] = self.graph.add(name, manifest, goal.config_name, goal.overrides, because)
        node.earlier, node.instance, node.checks = True, goal.instance, goal.checks
        self.wired[name] = frozenset(goal.wired)
        self.pending.append((node, goal))
        return node

    def _from_step(
        self, node: Node, port: Consumes, producer: Node, output: str | None, where: str | None
    ) -> InputSource | None:
        """The output of a named step: the one named, else the one that fits with the fewest conversions."""
        outputs = producer.manifest.outputs
        if output is not None and output not in outputs:
            node.failed.add(port.name)
            self.graph.report(
                UnknownPort(
                    f"{producer.key} has no output '{output}'",
                    chain=(producer.at(output), node.at(port.name)),
                    where=where,
                    expected=" or ".join(outputs) or "a step that produces something",
                    found=output,
                    hints=did_you_mean(nearest(output, outputs, 1)),
                )
            )
            return None
        names = list(outputs) if output is None else [output]
        paths = {name: self.types.path(outputs[name].type, port.type) for name in names}
        fewest = min((len(path) for path in paths.values() if path is not None), default=None)
        if fewest is None:
            node.failed.add(port.name)
            found = tuple(outputs[name].type for name in names)
            label = producer.at(names[0]) if len(names) == 1 else producer.key
            self.graph.report(
                hints.mismatch(self.graph.registry, node, port, label, found, where, producer.manifest.id)
            )
            return None
        best = [name for name, path in paths.items() if path is not None and len(path) == fewest]
        if len(best) > 1:
            node.failed.add(port.name)
            wirings = [f'{port.name} = "{producer.key}.{name}"' for name in best]
            self.graph.report(hints.ambiguous(node, port, [producer.at(n) for n in best], where, wirings))
            return None
        return self._fit(node, port, StepOutput(producer.key, best[0]), outputs[best[0]].type, where)

    def _from_chain(self, node: Node, port: Consumes) -> InputSource | None:
        candidates = self.chain.candidates(port)
        if len(candidates) > 1:
            node.failed.add(port.name)
            labels = [f"{c.source.step_key}.{c.source.port}" for c in candidates]
            hint = f"--input {self._target(node, port.name)}=PATH"
            self.graph.report(hints.ambiguous(node, port, labels, None, (hint,)))
            return None
        if not candidates:
            return None
        source, found = self.chain.look_through(candidates[0], port)
        return self._fit(node, port, source, found, None)

    # -- fitting ----------------------------------------------------------------------------------------------

    def _fit(
        self, node: Node, port: Consumes, source: InputSource, found: str | None, where: str | None
    ) -> InputSource | None:
        """The source, or the end of a chain of conversions to the port's type; None after reporting a mismatch."""
        path = () if found is None else self.types.path(found, port.type)
        if path is None:
            assert found is not None
            node.failed.add(port.name)
            producer = self.graph.nodes[source.step_key].manifest.id if isinstance(source, StepOutput) else ""
            label = self.graph.label(source)
            self.graph.report(hints.mismatch(self.graph.registry, node, port, label, (found,), where, producer))
            return None
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

    def _report_unnamed(self, node: Node, port: Consumes, reference: str | None, goal: Goal | None) -> None:
        if reference is not None:
            where = f"--input {port.name}={reference}"
            problem = hints.unnamed(node, port, f"--input {port.name}.NAME={reference}", where)
        elif goal is not None and port.name in goal.wired:
            problem = hints.unnamed(node, port, f"inputs.{port.name}.NAME", goal.where.get(port.name))
        elif node.config is not None and node.config.inputs.get(port.name) is not None:
            problem = hints.unnamed(node, port, f"inputs.{port.name}.NAME", node.config.where(f"inputs.{port.name}"))
        else:
            return
        node.failed.add(port.name)
        self.graph.report(problem)

    def _bound_value(self, node: Node, port: Consumes) -> tuple[str, str] | None:
        """(config key, value) when the port's first bound key already holds a real value."""
        if node.config is None or not port.bindings:
            return None
        key = next(iter(port.bindings))
        value = node.config.flat.get(key)
        return (key, value) if isinstance(value, str) and value and not is_placeholder(value) else None

    def _report_missing(self, node: Node, missing: Sequence[Consumes], goal: Goal | None) -> None:
        """Nothing feeds these required ports. If the step before in a list feeds none, one is a mismatch with it."""
        registry = self.graph.registry
        left = list(missing)
        before = self._step_before(node) if goal is not None and self.request.chained else None
        single = [port for port in left if not port.many]
        if before is not None and before.manifest.produces and single:
            found = tuple(entry.type for entry in before.manifest.produces)
            # The port that comes closest: one that wants a narrower type than it would get.
            narrower = [port for port in single if any(self.types.is_a(port.type, name) for name in found)]
            closest = (narrower or single)[0]
            left.remove(closest)
            self.graph.report(hints.mismatch(registry, node, closest, before.key, found, None, before.manifest.id))
        for port in left:
            self.graph.report(hints.missing(node, port, self._missing_hints(node, port, goal)))

    def _missing_hints(self, node: Node, port: Consumes, goal: Goal | None) -> tuple[str, ...]:
        target = self._target(node, port.name) + (".NAME" if port.many else "")
        if goal is None or self.request.chained:
            return hints.missing_input_hints(self.graph.registry, target, port, node.manifest.id)
        before = {stage.key: stage.manifest for stage in self.goals[: self.positions.get(node.key, 0)]}
        return hints.missing_stage_input_hints(self.types, target, port, node.key, before)

    def _step_before(self, node: Node) -> Node | None:
        """The step named just before this one, unless one of its outputs already feeds this step."""
        position = self.positions[node.key]
        before = self.goals[position - 1] if position else None
        return None if before is None or before.key in self._feeders(node) else before

    def _feeders(self, node: Node) -> set[str]:
        """Keys of the steps that feed this one, through converters as well."""
        feeders: set[str] = set()
        queue = [node]
        while queue:
            for source in queue.pop().inputs.values():
                if isinstance(source, StepOutput) and source.step_key not in feeders:
                    feeders.add(source.step_key)
                    if self.graph.nodes[source.step_key].inserted:
                        queue.append(self.graph.nodes[source.step_key])
        return feeders

    def _target(self, node: Node, port: str) -> str:
        """How `--input` names a port: bare where only one of the steps asked for has it and is not wired to another."""
        owners = [goal.key for goal in self.goals if port in goal.manifest.inputs and port not in self.wired[goal.key]]
        return port if owners == [node.key] else node.at(port)
