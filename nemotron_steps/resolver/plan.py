"""A plan: the steps to run, in order, and where each input port gets its artifact from. Plain frozen data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemotron_steps.config.layout.memory.devices import StepMemory
    from nemotron_steps.errors import StepsError
    from nemotron_steps.manifest.models import StepManifest
    from nemotron_steps.manifest.pipeline_models import StageCheck
    from nemotron_steps.resolver.problems import AbsentInput


@dataclass(frozen=True)
class SuppliedInput:
    """An artifact that exists already, or a path or name the user vouches for."""

    ref: str
    """What the user wrote: a path, `NAME:VERSION` or a model name."""
    type: str | None = None
    """None when it cannot be known here (a hub model name), then the port's type is trusted."""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    config_key: str | None = None
    """Set when the reference came from the port's bound config key, which then already holds it."""
    absent: AbsentInput | None = None
    """What of it is not here, so that it can be planned with and not run with."""
    folder: str | None = None
    """Of a model that the user has, what holds its config.json; None for anything else, artifacts of the home included:
    what was copied there is not to be changed."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-serialisable form."""
        given = {} if self.config_key is None else {"config_key": self.config_key}
        return {"ref": self.ref, "type": self.type, "attributes": dict(self.attributes), **given}


@dataclass(frozen=True)
class StepOutput:
    """The artifact that step `step_key` of the same plan leaves at output `port`."""

    step_key: str
    port: str

    def to_dict(self) -> dict[str, Any]:
        """JSON-serialisable form."""
        return {"step": self.step_key, "port": self.port}


InputSource = SuppliedInput | StepOutput
"""Where a port's artifact comes from."""


@dataclass(frozen=True)
class Instance:
    """Which instance of a fanned-out stage a step is: what was fanned out over → its value, as in the step's key."""

    stage: str
    labels: Mapping[str, str]


@dataclass(frozen=True)
class Changes:
    """How a step that has to run differs from the nearest result of it that is there, which `version` (of
    nemotron_steps) and `run` made. `code`: what of it changed, where nothing else did, so that it may be accepted."""

    differences: tuple[str, ...]
    version: str = ""
    run: str = ""
    code: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlannedStep:
    """One step of a plan."""

    key: str
    """Unique in the plan: the step id, `id@config` or a pipeline's stage name, numbered where needed."""
    step_id: str
    manifest: StepManifest
    config_name: str
    overrides: tuple[str, ...]
    config: Mapping[str, Any]
    """Composed, without its `inputs` section."""
    inputs: Mapping[str, InputSource]
    """Without the optional ports that nothing feeds."""
    produces: Mapping[str, str]
    """Output port → artifact type."""
    inserted: bool = False
    """A converter, which the request does not name."""
    because: str = ""
    """Why it is in the plan."""
    cached: Mapping[str, str] | None = None
    """Output port → artifact reference when nothing needs to run; None until a runner has looked."""
    changes: Changes | None = None
    """Why it must run; None where nothing needs to, or until a runner has looked."""
    earlier: bool = False
    """It comes before the first stage asked for, and is not run: its result must be there."""
    memory: StepMemory | None = None
    """What it takes of each device, and how its batch is cut; None where nothing is trained."""
    turn_ends: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Port of a model that writes chats → the tokens that end its turns, where they are known."""
    instance: Instance | None = None
    checks: tuple[StageCheck, ...] = ()
    variables: frozenset[str] = frozenset()
    """The environment variables that are set here and that the config takes values from."""
    job: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Key of `run.env`, or of `cluster` where a file or an override sets it → its value, and what set it."""

    def to_dict(self, *, with_config: bool = False) -> dict[str, Any]:
        """JSON-serialisable form; the config only on request, as it may hold values to be redacted."""
        fields: dict[str, Any] = {
            "key": self.key,
            "step": self.step_id,
            "config": self.config_name,
            "overrides": list(self.overrides),
            "inputs": {port: source.to_dict() for port, source in self.inputs.items()},
            "produces": dict(self.produces),
            "inserted": self.inserted,
            "because": self.because,
            "cached": None if self.cached is None else dict(self.cached),
        }
        if self.changes is not None:
            fields["changes"] = {**vars(self.changes)}
        if self.memory is not None:
            fields["memory"] = self.memory.to_dict()
        if self.turn_ends:
            fields["turn_ends"] = {port: list(ends) for port, ends in self.turn_ends.items()}
        if self.instance is not None:
            fields["instance"] = {**vars(self.instance)}
        if self.checks:
            fields["checks"] = [check.model_dump(exclude_none=True) for check in self.checks]
        if with_config:
            fields["values"] = dict(self.config)
        return fields


@dataclass(frozen=True)
class Plan:
    """Steps in an order in which every step comes after the steps it reads from."""

    steps: tuple[PlannedStep, ...]
    goals: tuple[str, ...]
    """Keys of the steps that were asked for, in the order asked."""
    name: str = ""
    """The pipeline's, or the goals joined."""
    warnings: tuple[str, ...] = ()
    unfilled: tuple[StepsError, ...] = ()
    """What has to be filled in before it can run; empty unless it was asked to be planned all the same."""
    taken: Mapping[str, str] = field(default_factory=dict)
    """`STEP.PORT` → the artifact of the home that a config's source with `existing` came to."""

    def __iter__(self) -> Iterator[PlannedStep]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps)

    def step(self, key: str) -> PlannedStep:
        """The step of that key. KeyError if there is none."""
        for planned in self.steps:
            if planned.key == key:
                return planned
        raise KeyError(key)

    def to_dict(self, *, with_config: bool = False) -> dict[str, Any]:
        """JSON-serialisable form for `--json` and `plan.json`."""
        return {
            "name": self.name,
            "goals": list(self.goals),
            "steps": [planned.to_dict(with_config=with_config) for planned in self.steps],
            "warnings": list(self.warnings),
        }


def job_of(steps: Iterable[PlannedStep]) -> dict[str, Sequence[Any]]:
    """Profile key → what steps that one job works on want of it together, what set it, and any other such values."""
    every = list(steps)
    jobs = [step.job for step in every if step.cached is None and not step.earlier] or [step.job for step in every]

    def most(jobs: Sequence[Mapping[str, Sequence[Any]]], key: str, instead: str = "") -> dict[str, Sequence[Any]]:
        wants = [[job[name] for name in (key, instead) if name in job and job[name][0] is not None] for job in jobs]
        said = [found[0] for found in wants if found]
        return {key: max(said, key=lambda found: found[0])} if said else {}

    found = most(jobs, "nodes", "cluster.num_nodes") | most(jobs, "gpus_per_node", "cluster.gpus_per_node")
    # The steps that there are so many nodes for say how each is divided, and those with GPUs in which image they work.
    largest = [
        job
        for job in jobs
        if most([job], "nodes", "cluster.num_nodes").get("nodes", [0])[0] == found.get("nodes", [0])[0]
    ]
    found |= most(largest, "ntasks_per_node")
    on_gpus = [job for job in jobs if job.get("gpus_per_node", [None])[0] != 0] or jobs
    said = [job["container_image"] for job in on_gpus if "container_image" in job]
    typed = [image for image in said if (image[1] or "").startswith("override ")]
    images = {image[0]: image for image in typed or said}
    return found | ({"container_image": [*next(iter(images.values())), *list(images)[1:]]} if images else {})
