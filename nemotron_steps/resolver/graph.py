"""The steps of a plan while it is made: nodes with their configs, converters between them, and their order."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from nemotron_steps.config.compose import Reference, read_reference
from nemotron_steps.errors import StepsError
from nemotron_steps.manifest.models import Consumes, StepManifest
from nemotron_steps.manifest.pipeline_models import StageCheck
from nemotron_steps.manifest.registry import Registry
from nemotron_steps.manifest.typegraph import Conversion
from nemotron_steps.resolver.plan import InputSource, Instance, PlannedStep, StepOutput, SuppliedInput
from nemotron_steps.resolver.problems import AmbiguousSource, PlanProblem, SourceCycle, UnknownPort
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
        return PlannedStep(
            key=self.key,
            step_id=self.manifest.id,
            manifest=self.manifest,
            config_name=self.config_name or DEFAULT,
            overrides=self.overrides,
            config=values,
            inputs=self.inputs,
            produces={port.name: port.type for port in self.manifest.produces},
            inserted=self.inserted,
            because=self.because,
            earlier=self.earlier,
            memory=None if subject is None else subject.memory,
            turn_ends={} if subject is None else subject.turn_ends,
            instance=self.instance,
            checks=self.checks,
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

    def find_step(self, step_id: str, where: str | None) -> StepManifest | None:
        """A step's manifest; None after reporting that there is none. `where` is who asked for it."""
        try:
            return self.registry.step(step_id)
        except StepsError as error:
            error.where = error.where or where
            self.report(error)
            return None

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

    def type_of(self, source: InputSource) -> str | None:
        """The artifact type of a source; None for a supplied one whose type is not known."""
        if isinstance(source, SuppliedInput):
            return source.type
        return self.nodes[source.step_key].manifest.outputs[source.port].type

    def label(self, source: InputSource) -> str:
        """A source in messages: what the user wrote, or STEP.PORT."""
        return source.ref if isinstance(source, SuppliedInput) else f"{source.step_key}.{source.port}"

    def in_order(self, goals: Iterable[Node]) -> list[Node]:
        """Goals and everything they need, dependencies first. A circle is reported and left out."""
        order: list[Node] = []
        state: dict[str, int] = {}  # 1: being visited, 2: done
        for goal in goals:
            stack: list[tuple[Node, bool]] = [(goal, False)]
            path: list[str] = []
            while stack:
                node, leaving = stack.pop()
                if leaving:
                    state[node.key] = 2
                    path.pop()
                    order.append(node)
                    continue
                if state.get(node.key) == 1:
                    loop = [*path[path.index(node.key) :], node.key]
                    self.report(
                        SourceCycle(
                            f"the inputs of {node.key} come, in the end, from itself",
                            chain=loop[::-1],
                            where=node.manifest.where("step"),
                            expected="sources that do not need this step",
                            hints=tuple(f"steps show {self.nodes[key].manifest.id}" for key in dict.fromkeys(loop)),
                        )
                    )
                    continue
                if state.get(node.key) == 2:
                    continue
                state[node.key] = 1
                path.append(node.key)
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
    bound: set[str] = set()
    for port in manifest.consumes:
        first, *others = [name for name in port.bindings if name in found and name not in bound] or [""]
        if not first or first != next(iter(port.bindings)):
            continue
        bound |= {first, *others}
        inputs.pop(port.name, None)
        problems += _wrong_parts(port, config, key, {name: found[name] for name in (first, *others)})
        _put(values, first, found[first].ref)
        for name in others:
            _put(values, name, None)
    fed_at = [next(iter(port.bindings)) for port in manifest.consumes if port.bindings]
    problems += [
        UnknownPort(
            f"'{name}' of {key} names an artifact, and no input is fed at that key",
            chain=(key,),
            where=config.where(name),
            expected=", ".join(fed_at) or "no artifact",
            found=str(each),
            hints=(f"steps artifacts show {each.ref}",),
        )
        for name, each in found.items()
        if name not in bound
    ]
    return replace(config, values=values, inputs=inputs), problems


def _wrong_parts(port: Consumes, config: StepConfig, key: str, here: dict[str, Reference]) -> list[PlanProblem]:
    first = next(iter(here.values()))
    problems: list[PlanProblem] = []
    for name, each in here.items():
        if each.ref != first.ref:
            problems.append(
                AmbiguousSource(
                    f"the config names several artifacts for the input '{port.name}' of {key}",
                    chain=(f"{key}.{port.name}",),
                    where=config.where(name),
                    expected=str(first),
                    found=str(each),
                    hints=(f"--input {port.name}={first.ref}", f"{name}=PATH"),
                )
            )
            continue
        inside = port.bindings[name]
        # Of `A.jsonl|B.jsonl` that is A: where an artifact has both, B is not what the key would get.
        split = inside.partition("|")[0].removesuffix(".jsonl") if inside.endswith(".jsonl") else None
        if each.field != "path" and _SPLITS.get(each.field, each.field) != split:
            problems.append(
                UnknownPort(
                    f"'{name}' of {key} takes another part of the artifact than its input fills in",
                    chain=(f"{key}.{port.name}",),
                    where=config.where(name),
                    expected=str(Reference(each.ref, "path")),
                    found=str(each),
                    hints=(f"{name}='{Reference(each.ref, 'path')}'",),
                )
            )
    return problems


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    node = values
    for part in parents:
        node = node[part]
    node[last] = value
