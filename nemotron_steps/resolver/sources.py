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
from nemotron_steps.resolver.graph import DEFAULT, Graph, Node
from nemotron_steps.resolver.input_binding import with_named_ports, with_sources_of_config
from nemotron_steps.resolver.plan import InputSource, StepOutput, SuppliedInput
from nemotron_steps.resolver.problems import PlanProblem, UnknownPort
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
        before = self.converted_from.get(produced.source.step_key)
        is_right = self.types.is_a(produced.type, port.type)
        if before is None or is_right or not self.types.is_a(before[1], port.type):
            return produced.source, produced.type
        return before


class Sources:
    """Finds sources for the ports of one request's steps, adding the steps that configs ask for to the graph."""

    def __init__(
        self,
        request: Request,
        graph: Graph,
        describe_input: DescribeInput,
        goals: Sequence[tuple[Goal, Node]],
        supplied: Mapping[tuple[str, str], str],
        newest: Newest,
    ) -> None:
        """`goals`: the steps asked for; `supplied`: (node key, port) → reference of a bare `--input`."""
        self.request = request
        self.graph = graph
        self.types = graph.types
        self.chain = Chain(graph.types)
        self.goals = [node for _, node in goals]
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
        self._shared: dict[tuple[str, str, tuple[str, ...]], Node] = {}
        """(step id, config name, overrides): named twice as a source, it is one node."""
        self._describe_input = describe_input
        self._newest = newest
        self._described: dict[tuple[str, str], SuppliedInput | None] = {}

    def feed(self, node: Node, goal: Goal | None) -> None:
        """Find a source for every port of a step. `goal` is None for a step that a config asked for."""
        self._shared.setdefault((node.manifest.id, node.config_name or DEFAULT, node.overrides), node)
        if node.config.inputs:
            node.manifest, of_config = with_sources_of_config(node.manifest, node.config.inputs)
            node.config = replace(node.config, inputs=of_config)
        wired = goal.wired if goal is not None else {}
        for name in [*wired, *node.config.inputs]:
            port = self.graph.registry.step(node.manifest.id).inputs.get(name)
            is_idle = port is not None and port.unless  # it is named for other configs of the step
            if name not in node.manifest.inputs and not is_idle:
                where = goal.where.get(name) if goal is not None and name in wired else None
                self.graph.report(hints.unknown_input(node, name, where or node.config.where(f"inputs.{name}")))
        missing = []
        for port in node.manifest.consumes:
            source = self._find(node, port, goal)
            if source is not None:
                node.inputs[port.name] = source
            elif port.required and port.name not in node.failed and node.composed:
                missing.append(port)
        if missing:
            self._report_missing(node, missing, goal)

    def _find(self, node: Node, port: Consumes, goal: Goal | None) -> InputSource | None:
        key = next(iter(port.bindings), "")
        value = node.config.flat.get(key)
        is_set = isinstance(value, str) and bool(value) and not is_placeholder(value)
        overridden = is_set and (node.config.where(key) or "").startswith("override")
        reference = self.supplied.get((node.key, port.name))
        target = node.at(port.name)
        if target not in self.request.inputs:
            target = f"{node.manifest.id}.{port.name}"
        if target in self.request.inputs:
            self.used.add(target)
            reference = self.request.inputs[target]
        if port.many:  # it is here where no artifact has a name, and each needs one
            return self._unnamed(node, port, reference, goal)
        if reference is not None:
            if overridden:
                return self._fail(node, port, hints.two_sources(node, port, reference, f"{key}={value}"))
            return self._from_reference(node, port, reference, f"--input {port.name}={reference}")
        if overridden:
            return self._from_config_key(node, port, key, str(value))
        if goal is not None and port.name in goal.wired:
            return self._from_stage(node, port, goal.wired[port.name], goal.where.get(port.name))
        if goal is not None and self.request.chained:
            source = self._from_chain(node, port)
            if source is not None or port.name in node.failed:
                return source
        by_variable = is_set and bool(node.config.variables.get(key))
        if node.config.inputs.get(port.name) is not None and not by_variable:
            return self._from_config_source(node, port, node.config.inputs[port.name])
        return self._from_config_key(node, port, key, str(value)) if is_set else None

    def extend_chain(self, node: Node) -> None:
        """Make a fed step's outputs available to the steps after it in a plain list."""
        self.chain.add(node.key, node.manifest)
        if node.manifest.id not in self._converters:
            return
        entrances = [node.inputs[p.name] for p in node.manifest.consumes if p.required and p.name in node.inputs]
        found = self.graph.type_of(entrances[0]) if len(entrances) == 1 else None
        if found is not None:
            self.chain.converted_from[node.key] = (entrances[0], found)

    def _fail(self, node: Node, port: Consumes, problem: PlanProblem | None = None) -> InputSource | None:
        """There is no source, and why is reported, or was."""
        node.failed.add(port.name)
        if problem is not None:
            self.graph.report(problem)
        return None

    # -- kinds of source --------------------------------------------------------------------------------------

    def _from_reference(self, node: Node, port: Consumes, ref: str, where: str | None) -> InputSource | None:
        supplied = self._describe(node, port, ref, where)
        return None if supplied is None else self._fit(node, port, supplied, supplied.type, where)

    def _from_config_key(self, node: Node, port: Consumes, key: str, value: str) -> InputSource | None:
        where = node.config.where(key)
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
            manifest = self.graph.find_step(goal.step_id, goal.where.get(""))
            if manifest is not None:
                manifest = with_named_ports(manifest, name, goal, self.request)
                because = f"an earlier stage of {self.request.name}"
                producer = self.graph.add(name, manifest, goal.config_name, goal.overrides, because)
                producer.earlier, producer.instance, producer.checks = True, goal.instance, goal.checks
                self.stages[name] = producer
                self.wired[name] = frozenset(goal.wired)
                self.pending.append((producer, goal))
        if producer is None:  # its step is unknown, which was reported
            return self._fail(node, port)
        return self._from_step(node, port, producer, wired.port, where)

    def _from_config_source(self, node: Node, port: Consumes, source: Any) -> InputSource | None:
        """`inputs: {PORT: {step: ID, config: NAME, overrides: [...], port: NAME, existing: HOW}}`, or a reference."""
        where = node.config.where(f"inputs.{port.name}")
        if isinstance(source, str):
            return self._from_reference(node, port, source, where)
        if (
            not isinstance(source, Mapping)
            or ("step" in source) == ("ref" in source)
            or set(source) - _SOURCE_KEYS
            or not isinstance(source.get("overrides"), str | list | tuple | None)
            or source.get("existing") not in (_EXISTING if "step" in source else (None,))
        ):
            problem = UnknownPort(
                f"the config's source for '{port.name}' of {node.key} cannot be read",
                chain=(node.at(port.name),),
                where=where,
                expected="{step: STEP, config: NAME, overrides: [...], port: PORT, existing: prefer|require}, "
                "{ref: REF}, or REF",
                found=str(source),
            )
            return self._fail(node, port, problem)
        if "ref" in source:
            return self._from_reference(node, port, str(source["ref"]), where)
        manifest = self.graph.find_step(str(source["step"]), where)
        if manifest is None:
            return self._fail(node, port)
        given = source.get("overrides") or ()
        if source.get("existing") is not None and not given:
            ref = self._left_before(node, port, source, manifest, where)
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

    def _left_before(
        self, node: Node, port: Consumes, source: Mapping[str, Any], manifest: StepManifest, where: str | None
    ) -> str | None:
        """What an earlier run of a config's source left; None after reporting that a required one is not here."""
        config_name = str(source.get("config") or DEFAULT)
        outputs = [name for name in manifest.outputs if source.get("port") in (None, name)]
        of = f"{manifest.id} -c {config_name}"
        target = self._target(node, port.name)
        for output in outputs:
            ref = self._newest(manifest.id, config_name, output)
            if ref is not None:
                self.taken[node.at(port.name)] = ref
                newest = f"{port.name} of {node.key} is {ref}, the newest that {of} left here"
                self.notes.append(f"{newest}; --input {target}=REF takes another")
                return ref
        if source["existing"] == "require":
            others = [ref for output in outputs if (ref := self._newest(manifest.id, None, output)) is not None]
            given = [f"--input {target}={ref}" for ref in (*others, "PATH")]
            what = f"'{port.name}' of {node.key} is made by {of}, which has made none in this home"
            problem = hints.missing(node, port, (f"steps run {of}", *given), what)
            problem.where, problem.chain, problem.found = where, (of, node.at(port.name)), "none in this home"
            self._fail(node, port, problem)
        return None

    def _from_step(
        self, node: Node, port: Consumes, producer: Node, output: str | None, where: str | None
    ) -> InputSource | None:
        """The output of a named step: the one named, else the one that fits with the fewest conversions."""
        outputs = producer.manifest.outputs
        if output is not None and output not in outputs:
            problem = UnknownPort(
                f"{producer.key} has no output '{output}'",
                chain=(producer.at(output), node.at(port.name)),
                where=where,
                expected=" or ".join(outputs) or "a step that produces something",
                found=output,
                hints=did_you_mean(nearest(output, outputs, 1)),
            )
            return self._fail(node, port, problem)
        names = list(outputs) if output is None else [output]
        paths = {name: self.types.path(outputs[name].type, port.type) for name in names}
        fewest = min((len(path) for path in paths.values() if path is not None), default=None)
        if fewest is None:
            label = producer.at(names[0]) if len(names) == 1 else producer.key
            return self._mismatch(node, port, label, [outputs[name].type for name in names], where, producer)
        best = [name for name, path in paths.items() if path is not None and len(path) == fewest]
        if len(best) > 1:
            wirings = [f'{port.name} = "{producer.key}.{name}"' for name in best]
            problems = hints.ambiguous(node, port, [producer.at(name) for name in best], where, wirings)
            return self._fail(node, port, problems)
        return self._fit(node, port, StepOutput(producer.key, best[0]), outputs[best[0]].type, where)

    def _from_chain(self, node: Node, port: Consumes) -> InputSource | None:
        candidates = self.chain.candidates(port)
        if not candidates:
            return None
        if len(candidates) > 1:
            labels = [self.graph.label(found.source) for found in candidates]
            hint = f"--input {self._target(node, port.name)}=PATH"
            return self._fail(node, port, hints.ambiguous(node, port, labels, None, (hint,)))
        source, kind = self.chain.look_through(candidates[0], port)
        return self._fit(node, port, source, kind, None)

    # -- fitting ----------------------------------------------------------------------------------------------

    def _fit(
        self, node: Node, port: Consumes, source: InputSource, found: str | None, where: str | None
    ) -> InputSource | None:
        """The source, or the end of a chain of conversions to the port's type; None after reporting a mismatch."""
        if found is None:
            return source
        path = self.types.path(found, port.type)
        if path is None:
            producer = self.graph.nodes[source.step_key] if isinstance(source, StepOutput) else None
            return self._mismatch(node, port, self.graph.label(source), [found], where, producer)
        return self.graph.convert(source, path, node, port.name)

    def _mismatch(
        self, node: Node, port: Consumes, label: str, found: Sequence[str], where: str | None, producer: Node | None
    ) -> InputSource | None:
        made_by = "" if producer is None else producer.manifest.id
        return self._fail(node, port, hints.mismatch(self.graph.registry, node, port, label, found, where, made_by))

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

    def _unnamed(self, node: Node, port: Consumes, reference: str | None, goal: Goal | None) -> InputSource | None:
        """An artifact is given to a port that takes many, each under a name, without one."""
        named = f"inputs.{port.name}.NAME"
        where: str | None
        if reference is not None:
            named, where = f"--input {port.name}.NAME={reference}", f"--input {port.name}={reference}"
        elif goal is not None and port.name in goal.wired:
            where = goal.where.get(port.name)
        elif node.config.inputs.get(port.name) is not None:
            where = node.config.where(f"inputs.{port.name}")
        else:
            return None
        problem = UnknownPort(
            f"'{port.name}' of {node.key} takes several artifacts, each under a name",
            chain=(node.at(port.name),),
            where=where,
            expected=named,
            found="no name",
        )
        return self._fail(node, port, problem)

    def _report_missing(self, node: Node, missing: list[Consumes], goal: Goal | None) -> None:
        """Nothing feeds these required ports. If the step before in a list feeds none, one is a mismatch with it."""
        chained = self.request.chained
        before = self.goals[: self.goals.index(node)] if node in self.goals else []
        single = [port for port in missing if not port.many]
        found = [entry.type for entry in before[-1].manifest.produces] if before and chained else []
        if found and single and not self._feeds(before[-1], node):
            # The port that comes closest: one that wants a narrower type than it would get.
            narrower = [port for port in single if any(self.types.is_a(port.type, name) for name in found)]
            closest = (narrower or single)[0]
            missing.remove(closest)
            self._mismatch(node, closest, before[-1].key, found, None, before[-1])
        for port in missing:
            target = self._target(node, port.name) + (".NAME" if port.many else "")
            if goal is not None and not chained:
                paste = hints.missing_stage_input_hints(self.types, target, port, node.key, before)
            else:
                paste = hints.missing_input_hints(self.graph.registry, target, port, node.manifest.id)
            self.graph.report(hints.missing(node, port, paste))

    def _feeds(self, before: Node, node: Node) -> bool:
        """Whether a step feeds another, through converters as well."""
        keys = {source.step_key for source in node.inputs.values() if isinstance(source, StepOutput)}
        inserted = [self.graph.nodes[key] for key in keys if self.graph.nodes[key].inserted]
        return before.key in keys or any(self._feeds(before, converter) for converter in inserted)

    def _target(self, node: Node, port: str) -> str:
        """How `--input` names a port: bare where only one of the steps asked for has it and is not wired to another."""
        owners = [goal.key for goal in self.goals if port in goal.manifest.inputs and port not in self.wired[goal.key]]
        return port if owners == [node.key] else node.at(port)
