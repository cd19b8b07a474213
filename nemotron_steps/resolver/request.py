"""What is asked of the resolver, and what it needs from the layers beside it, as plain types."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

from nemotron_steps.config.layout.parallel_config import ParallelConfig
from nemotron_steps.manifest.pipeline_models import PipelineManifest, StageCheck, StageSource
from nemotron_steps.resolver.plan import Instance, SuppliedInput

_SCALARS = frozenset({str, int, float, bool, type(None), list, tuple})


@dataclass(frozen=True)
class Goal:
    """One step that was asked for.

    Attributes:
        step_id: which step.
        config_name: which of its configs (a name or a path); None for `default`, which a step may lack.
        overrides: Hydra overrides.
        name: a pipeline's stage name; the plan's key for it.
        wired: port → earlier stage or reference, from a pipeline file.
        where: port → file:line of that wiring; '' → file:line of the stage.
        earlier: whether it is a stage before the first one asked for: it is not run, what it left is read.
        instance: which instance of a fanned-out stage it is.
        checks: what its results have to be before anything that reads them runs.
    """

    step_id: str
    config_name: str | None = None
    overrides: tuple[str, ...] = ()
    name: str | None = None
    wired: Mapping[str, StageSource] = field(default_factory=dict)
    where: Mapping[str, str] = field(default_factory=dict)
    earlier: bool = False
    instance: Instance | None = None
    checks: tuple[StageCheck, ...] = ()


@dataclass(frozen=True)
class Request:
    """What to plan.

    Attributes:
        goals: steps in the order asked.
        command: the request as typed after `steps plan`, for hints: `rl/nemo_rl/rlhf -c tiny`.
        inputs: `PORT` or `STEP.PORT` → what the user gave for it (a path, NAME:VERSION, …).
        chained: a plain list of steps, whose outputs are connected to later inputs by type. False for a pipeline,
            which says itself what goes where.
        name: the pipeline's name; empty for a list.
    """

    goals: tuple[Goal, ...]
    command: str
    inputs: Mapping[str, str] = field(default_factory=dict)
    chained: bool = True
    name: str = ""


@dataclass(frozen=True)
class StepConfig:
    """A step's composed config.

    Attributes:
        values: plain values, interpolations resolved, without `inputs`.
        inputs: the config's `inputs` section: port → source, as written.
        has_key: whether the step's config model has a dotted key; None when the step has no config model.
        origin: dotted key → `file:line` or `override '…'` that set it; None when unknown.
        variables: dotted key → the environment variables it takes its value from, for those that are set.
        idle: (environment variable, config) for those that are set and that only another config of the step reads.
        unread: why the config could not be read, where that stops nothing: the step has no implementation here.
        job: see PlannedStep.
        flat: every value under its dotted key, groups as well as what is in them; list items are not keys.
    """

    values: Mapping[str, Any]
    inputs: Mapping[str, Any] = field(default_factory=dict)
    has_key: Callable[[str], bool] | None = None
    origin: Callable[[str], str | None] | None = None
    variables: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    idle: tuple[tuple[str, str], ...] = ()
    unread: str | None = None
    job: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    flat: Mapping[str, Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "flat", _flatten(self.values))

    @cached_property
    def sizes(self) -> ParallelConfig:
        """What the layout is checked and its memory predicted from."""
        return ParallelConfig.read(self.flat.get)

    def with_values(self, changes: Mapping[str, Any]) -> StepConfig:
        """The config with other values of dotted keys."""
        values: Mapping[str, Any] = self.values
        for key, value in changes.items():
            values = _with_value(values, key.split("."), value)
        return replace(self, values=values)

    def where(self, key: str) -> str | None:
        """What set a key, if known."""
        return self.origin(key) if self.origin is not None else None


def _with_value(values: Mapping[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    head, *rest = path
    if rest:
        inner = values.get(head)
        value = _with_value(inner if isinstance(inner, Mapping) else {}, rest, value)
    return {**values, head: value}


def _flatten(values: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    stack: list[tuple[str, Mapping[str, Any]]] = [("", values)]
    while stack:
        prefix, group = stack.pop()
        for name, value in group.items():
            key = f"{prefix}{name}"
            flat[key] = value
            # Most values are scalars, and asking an abstract class about each is what would take time.
            kind = type(value)
            if kind is dict or (kind not in _SCALARS and isinstance(value, Mapping)):
                stack.append((f"{key}.", value))
    return flat


class Compose(Protocol):
    """Composes one config of one step. Raises StepsError for anything wrong with it."""

    def __call__(self, step_id: str, config_name: str | None, overrides: Sequence[str]) -> StepConfig:
        """The composed config; a step without a config of its own has an empty one."""


class DescribeInput(Protocol):
    """Says what a user-supplied reference is. Raises StepsError if it does not exist or cannot be told."""

    def __call__(self, ref: str, wanted_type: str) -> SuppliedInput:
        """What `ref` is, for a port of `wanted_type`; type None to trust the port."""


Newest = Callable[[str, str | None, str], str | None]
"""(step, config, output) → NAME:VERSION of the newest artifact left there; of any config for None."""


def request_for_steps(
    steps: Sequence[str],
    *,
    config_name: str | None = None,
    overrides: Sequence[str] = (),
    inputs: Mapping[str, str] | None = None,
) -> Request:
    """A step, or a list of steps to be connected by type.

    The config name goes to every step that is named; overrides go to the last one, which is what the user is after.
    """
    goals = tuple(
        Goal(step_id, config_name, tuple(overrides) if position == len(steps) - 1 else ())
        for position, step_id in enumerate(steps)
    )
    command = " ".join([*steps, *(["-c", config_name] if config_name is not None else [])])
    return Request(goals, command, inputs or {})


def request_for_pipeline(pipeline: PipelineManifest, *, inputs: Mapping[str, str] | None = None) -> Request:
    """A pipeline file's stages, wired as the file says."""
    goals = []
    for index, stage in enumerate(pipeline.stages):
        where = {port: pipeline.where("stages", index, "inputs", *port.split(".")) for port in stage.inputs}
        goals.append(
            Goal(
                stage.step,
                stage.config,
                stage.overrides,
                stage.name,
                stage.inputs,
                {**where, "": pipeline.where("stages", index)},
                checks=stage.checks,
            )
        )
    return Request(tuple(goals), pipeline.name, inputs or {}, chained=False, name=pipeline.name)
