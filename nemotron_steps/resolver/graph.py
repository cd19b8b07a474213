"""The steps of a plan while it is made: nodes with their configs, converters between them, and their order."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from nemotron_steps.config.compose import Reference, read_reference
from nemotron_steps.errors import StepsError
from nemotron_steps.manifest.models import StepManifest
from nemotron_steps.manifest.pipeline_models import StageCheck
from nemotron_steps.manifest.registry import Registry
from nemotron_steps.manifest.typegraph import Conversion
from nemotron_steps.resolver.plan import InputSource, Instance, PlannedStep, StepOutput, SuppliedInput
from nemotron_steps.resolver.problems import PlanProblem, SourceCycle, UnknownPort
from nemotron_steps.resolver.request import Compose, StepConfig

if TYPE_CHECKING:
    from nemotron_steps.resolver.checks import CheckSubject

DEFAULT = "default"
"""The config a step runs with when none is named."""

_SPLITS = {"val": "validation", "test": "heldout"}
"""Splits there → here."""


@dataclass(eq=False)
class Node:
    """A step being planned. `config` is empty when it did not compose, which was reported."""

    key: str
    manifest: StepManifest
    config_name: str | None
    overrides: tuple[str, ...]
    because: str
    config: StepConfig = field(default_factory=lambda: StepConfig({}))
    composed: bool = False
    inserted: bool = False
    earlier: bool = False
    instance: Instance | None = None
    checks: tuple[StageCheck, ...] = ()
    inputs: dict[str, InputSource] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    """Input ports that an error was already reported for."""

    def at(self, port: str) -> str:
        """`KEY.PORT`."""
        return f"{self.key}.{port}"

    def planned(self, subject: CheckSubject | None) -> PlannedStep:
        """The finished step, with what is known of its models and of the memory that it takes."""
        values = self.config.values
        replaced = {key for port in self.inputs for key in self.manifest.inputs[port].instead_of}
        if replaced:  # an input stands in place of these
            overridden = {override.partition("=")[0].lstrip("+") for override in self.overrides}
            values = {**values, **dict.fromkeys((replaced - overridden) & values.keys())}
        fields = {name: value for name, value in vars(self).items() if name in PlannedStep.__dataclass_fields__}
        fields |= {"config": values, "config_name": self.config_name or DEFAULT}
        return PlannedStep(
            **fields,
            step_id=self.manifest.id,
            produces={port.name: port.type for port in self.manifest.produces},
            memory=None if subject is None else subject.memory,
            turn_ends={} if subject is None else subject.turn_ends,
            variables=frozenset().union(*self.config.variables.values()),
            job=self.config.job,
        )


class Graph:
    """All nodes of one plan. Errors go to `problems`, shared with the whole resolution."""

    def __init__(self, registry: Registry, compose: Compose, problems: list[StepsError]) -> None:
        self.registry = registry
        self.types = registry.types
        self.problems = problems
        self.nodes: dict[str, Node] = {}
        self.uncomposed: list[tuple[Node, StepsError]] = []
        """What keeps configs from being composed, and the step each belongs to."""
        self._compose = compose
        self._conversions: dict[tuple[tuple[str, str | None], str, str | None], StepOutput] = {}

    def find_step(self, step_id: str, where: str | None) -> StepManifest:
        """A step's manifest. StepsError, at `where`, who asked for it, if there is none."""
        try:
            return self.registry.step(step_id)
        except StepsError as error:
            error.where = error.where or where
            raise

    def report(self, error: StepsError) -> None:
        """Note an error; one that carries several is taken apart."""
        for problem in getattr(error, "problems", ()) or (error,):
            if problem not in self.problems:
                self.problems.append(problem)

    def add(
        self,
        name: str,
        manifest: StepManifest,
        config_name: str | None,
        overrides: Sequence[str],
        because: str,
        *,
        inserted: bool = False,
    ) -> Node:
        """A new node, with a key of its own made from `name`, and its config composed."""
        key = name
        if key in self.nodes and config_name is not None:
            key = f"{name}@{config_name}"
        base, number = key, 2
        while key in self.nodes:
            key, number = f"{base}#{number}", number + 1
        node = Node(key, manifest, config_name, tuple(overrides), because, inserted=inserted)
        self.nodes[key] = node
        try:
            composed = self._compose(manifest.id, config_name, tuple(overrides))
            node.config, problems = with_references(manifest, composed, key)
            node.composed = True
            if manifest.varies:
                node.manifest = manifest.under(node.config.flat)
            for problem in problems:
                self.report(problem)
        except StepsError as error:
            self.uncomposed += [(node, problem) for problem in getattr(error, "problems", ()) or (error,)]
            self.report(error)
        return node

    def convert(self, source: InputSource, path: Iterable[Conversion], consumer: Node, port: str) -> InputSource:
        """Append the conversions of `path` to a source. The same artifact is converted the same way only once."""
        for hop in path:
            manifest = self.registry.step(hop.step_id)
            # A converter runs at the scale of the step it serves, where it has a config of that name.
            config_name = consumer.config_name if consumer.config_name in manifest.config_names else None
            of = (source.ref, source.type) if isinstance(source, SuppliedInput) else (self.label(source), None)
            key = (of, hop.step_id, config_name)
            if key not in self._conversions:
                because = f"{consumer.at(port)} needs {hop.target}"
                node = self.add(hop.step_id, manifest, config_name, (), because, inserted=True)
                node.inputs[next(p.name for p in manifest.consumes if p.required)] = source
                output = next(p for p in manifest.produces if self.types.is_a(p.type, hop.target))
                self._conversions[key] = StepOutput(node.key, output.name)
            source = self._conversions[key]
        return source

    def label(self, source: InputSource) -> str:
        """A source in messages: what the user wrote, or STEP.PORT."""
        return source.ref if isinstance(source, SuppliedInput) else f"{source.step_key}.{source.port}"

    def in_order(self, goals: Sequence[Node]) -> list[Node]:
        """Goals and everything they need, dependencies first. A circle is reported and left out."""
        order: list[Node] = []
        path: dict[str, None] = {}  # what is being visited
        done: set[str] = set()
        stack = [(goal, False) for goal in reversed(goals)]
        while stack:
            node, leaving = stack.pop()
            if leaving:
                del path[node.key]
                done.add(node.key)
                order.append(node)
            elif node.key in path:
                keys = list(path)
                loop = [*keys[keys.index(node.key) :], node.key]
                what = f"the inputs of {node.key} come, in the end, from itself"
                hints = tuple(f"steps show {self.nodes[key].manifest.id}" for key in dict.fromkeys(loop))
                self.report(SourceCycle(what, chain=loop[::-1], where=node.manifest.where("step"), hints=hints))
            elif node.key not in done:
                path[node.key] = None
                stack.append((node, True))
                needed = [s.step_key for s in node.inputs.values() if isinstance(s, StepOutput)]
                stack.extend((self.nodes[key], False) for key in reversed(needed))
        return order


def with_references(manifest: StepManifest, config: StepConfig, key: str) -> tuple[StepConfig, list[PlanProblem]]:
    """The config with every reference readable as what `--input` takes, and what is wrong about them.

    An input is fed at the first key that it is bound to; it fills its other keys, so a reference there is left out. It
    comes before the source that the `inputs` of a base config gives the same port."""
    found = {name: each for name, value in config.flat.items() if (each := read_reference(value)) is not None}
    given = {port: each.ref for port, source in config.inputs.items() if (each := read_reference(source)) is not None}
    if not found and not given:
        return config, []
    values, inputs = copy.deepcopy(dict(config.values)), {**config.inputs, **given}
    problems: list[PlanProblem] = []

    def wrong(name: str, what: str, expected: str, hint: str) -> None:
        said = {"where": config.origin(name), "expected": expected, "found": str(found[name])}
        problems.append(UnknownPort(f"'{name}' of {key} {what}", chain=(key,), hints=(hint,), **said))

    bound: set[str] = set()
    for port in manifest.consumes:
        names = [name for name in port.bindings if name in found and name not in bound]
        if not names or names[0] != next(iter(port.bindings)):
            continue
        ref = found[names[0]].ref
        bound.update(names)
        inputs.pop(port.name, None)
        for name in names:
            *parents, last = name.split(".")
            group = values
            for part in parents:
                group = group[part]
            group[last] = ref if name == names[0] else None
            # Of `A.jsonl|B.jsonl` the split is A: where an artifact has both, B is not what the key would get.
            inside, part = port.bindings[name].partition("|")[0], found[name].field
            split = _SPLITS.get(part, part)
            if found[name].ref != ref or (part != "path" and f"{split}.jsonl" != inside):
                whole = str(Reference(ref, "path"))
                wrong(name, "names something else than its input fills in", whole, f"{name}='{whole}'")
    fed_at = ", ".join(next(iter(port.bindings)) for port in manifest.consumes if port.bindings)
    for name in found:
        if name not in bound:
            show = f"steps artifacts show {found[name].ref}"
            wrong(name, "names an artifact, and no input is fed at that key", fed_at or "no artifact", show)
    return replace(config, values=values, inputs=inputs), problems
