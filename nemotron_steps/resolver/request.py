"""What is asked of the resolver, and what it needs from the layers beside it, as plain types."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from nemotron_steps.config.layout.parallel_config import ParallelConfig
from nemotron_steps.manifest.pipeline_models import PipelineManifest, StageCheck, StageSource
from nemotron_steps.resolver.plan import Instance, SuppliedInput

_SCALARS = frozenset({str, int, float, bool, type(None), list, tuple})


@dataclass(frozen=True)
class Goal:
    """One step that was asked for; of a pipeline, a stage."""

    step_id: str
    config_name: str | None = None
    """A name or a path; None for `default`, which a step may lack."""
    overrides: tuple[str, ...] = ()
    name: str | None = None
    """The stage's, which is the plan's key for it."""
    wired: Mapping[str, StageSource] = field(default_factory=dict)
    where: Mapping[str, str] = field(default_factory=dict)
    """Port → file:line of that wiring; '' → file:line of the stage."""
    earlier: bool = False
    """It comes before the first stage asked for: it is not run, what it left is read."""
    instance: Instance | None = None
    checks: tuple[StageCheck, ...] = ()


@dataclass(frozen=True)
class Request:
    """What to plan: steps in the order asked."""

    goals: tuple[Goal, ...]
    command: str
    """The request as typed after `steps plan`."""
    inputs: Mapping[str, str] = field(default_factory=dict)
    """`PORT` or `STEP.PORT` → what the user gave for it (a path, NAME:VERSION, …)."""
    chained: bool = True
    """A plain list, whose outputs are connected to later inputs by type. A pipeline says itself what goes where."""
    name: str = ""
    """The pipeline's; empty for a list."""


@dataclass(frozen=True)
class StepConfig:
    """A step's composed config: plain values without `inputs`, interpolations resolved."""

    values: Mapping[str, Any]
    inputs: Mapping[str, Any] = field(default_factory=dict)
    """Port → source, as written."""
    has_key: Callable[[str], bool] | None = None
    """Whether the step's config model has a dotted key; None when the step has no config model."""
    origin: Callable[[str], str | None] = lambda key: None
    """Dotted key → `file:line` or `override '…'` that set it."""
    variables: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Dotted key → the environment variables it takes its value from, for those that are set."""
    job: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """See PlannedStep."""
    unread: str | None = None
    """Why the config of a step without an implementation here cannot be read."""

    @cached_property
    def flat(self) -> dict[str, Any]:
        """Every value under its dotted key, groups as well as what is in them; list items are not keys."""
        flat: dict[str, Any] = {}
        stack: list[tuple[str, Mapping[str, Any]]] = [("", self.values)]
        while stack:
            prefix, group = stack.pop()
            for name, value in group.items():
                key = f"{prefix}{name}"
                flat[key] = value
                # Most values are scalars, and asking an abstract class about each is what would take time.
                if type(value) not in _SCALARS and isinstance(value, Mapping):
                    stack.append((f"{key}.", value))
        return flat

    @cached_property
    def sizes(self) -> ParallelConfig:
        """What the layout is checked and its memory predicted from."""
        return ParallelConfig.read(self.flat.get)


Compose = Callable[[str, str | None, Sequence[str]], StepConfig]
"""(step, config, overrides) → the composed config. Raises StepsError for anything wrong with it."""
DescribeInput = Callable[[str, str], SuppliedInput]
"""(what the user gave, the port's type) → what it is; type None to trust the port. Raises StepsError if it is not
there, or cannot be told."""
Newest = Callable[[str, str | None, str], str | None]
"""(step, config, output) → NAME:VERSION of the newest artifact left there; of any config for None."""


def request_for_steps(
    steps: Sequence[str],
    *,
    config_name: str | None = None,
    overrides: Sequence[str] = (),
    inputs: Mapping[str, str] | None = None,
) -> Request:
    """A step, or a list to be connected by type. Overrides go to the last one, which is what the user is after."""
    goals = [Goal(step_id, config_name) for step_id in steps[:-1]]
    goals.append(Goal(steps[-1], config_name, tuple(overrides)))
    config = [] if config_name is None else ["-c", config_name]
    return Request(tuple(goals), " ".join([*steps, *config]), inputs or {})


def request_for_pipeline(pipeline: PipelineManifest, *, inputs: Mapping[str, str] | None = None) -> Request:
    """A pipeline file's stages, wired as the file says."""
    goals = []
    for index, stage in enumerate(pipeline.stages):
        where = {port: pipeline.where("stages", index, "inputs", *port.split(".")) for port in stage.inputs}
        where[""] = pipeline.where("stages", index)
        wired = stage.inputs
        goals.append(Goal(stage.step, stage.config, stage.overrides, stage.name, wired, where, checks=stage.checks))
    return Request(tuple(goals), pipeline.name, inputs or {}, chained=False, name=pipeline.name)
