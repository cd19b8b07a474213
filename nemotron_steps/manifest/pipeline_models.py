"""A pipeline's file as frozen models: stages, where their inputs come from, and what `-c NAME` means for each."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, StrictBool, StrictFloat, StrictInt, StrictStr, field_validator, model_validator

from nemotron_steps.manifest.models import DOTTED, ManifestFile, OneOrMore, Strings, Table

Scalar = StrictBool | StrictInt | StrictFloat | StrictStr


class StageSource(Table):
    """Where a stage's port gets its artifact: an earlier stage (and port), or a path or artifact name."""

    stage: StrictStr | None = None
    port: StrictStr | None = None
    ref: StrictStr | None = None

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, data: Any) -> Any:
        if isinstance(data, str):
            stage, dot, port = data.partition(".")
            return {"stage": stage, "port": port} if dot else {"stage": stage}
        return data

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.stage is None) == (self.ref is None):
            raise ValueError("name either a stage ('sft' or 'sft.checkpoint') or { ref = \"PATH or NAME:VERSION\" }")
        return self


class StageCheck(Table):
    """`[[stages.checks]]`: what a number that a stage reported has to be, before anything that reads the stage runs."""

    metric: StrictStr
    """Of its summary (`held_out_reward`, of a table `NAME/ROW/COLUMN`), else of its metrics, the last value."""
    at_least: StrictInt | StrictFloat | None = None
    at_most: StrictInt | StrictFloat | None = None
    severity: Literal["block", "warn"] = "block"

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        if self.at_least is None and self.at_most is None:
            raise ValueError(f"the check of {self.metric!r} has no bound: give at_least, at_most or both")
        if self.at_least is not None and self.at_most is not None and not self.at_least <= self.at_most:
            raise ValueError(f"no number passes the check of {self.metric!r}: {self.expected}")
        return self

    @property
    def expected(self) -> str:
        """The bounds in words."""
        bounds = (("at least", self.at_least), ("at most", self.at_most))
        return " and ".join(f"{words} {bound}" for words, bound in bounds if bound is not None)

    def holds(self, value: float) -> bool:
        """Whether a value is within the bounds; NaN never is."""
        low = self.at_least is None or value >= self.at_least
        return low and (self.at_most is None or value <= self.at_most)


class Stage(Table):
    """`[[stages]]` of a pipeline: a step with a config and wired inputs."""

    step: StrictStr
    name: StrictStr = ""
    """Default: the last part of the step id."""
    description: StrictStr = ""
    config: StrictStr | None = None
    """Config name; None for `default`, which a step may lack."""
    overrides: OneOrMore = ()
    inputs: dict[StrictStr, StageSource] = Field(default_factory=dict)
    """Port → source. A port that takes many has a table of them, NAME → source, and is `PORT.NAME` here."""
    fan_out: dict[StrictStr, Annotated[tuple[Scalar, ...], Field(min_length=1)]] = Field(default_factory=dict)
    """Config key, or `inputs.PORT` → values: the stage is one of its own for each value, for each combination of
    several keys' values."""

    checks: tuple[StageCheck, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _name_defaults_to_step(cls, data: Any) -> Any:
        if isinstance(data, dict) and not data.get("name") and isinstance(data.get("step"), str):
            return {**data, "name": data["step"].rpartition(":")[2].rsplit("/", 1)[-1]}
        return data

    @field_validator("fan_out")
    @classmethod
    def _instances_differ(cls, table: dict[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
        for key, values in table.items():
            if not DOTTED.fullmatch(key):
                raise ValueError(f"fan_out: {key!r} is not a dotted config key, nor inputs.PORT")
            if len({(type(value), value) for value in values}) < len(values):
                raise ValueError(f"fan_out: {key} has a value twice; each instance has one of its own")
        return table

    @field_validator("inputs", mode="before")
    @classmethod
    def _many_are_named(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        flat: dict[str, Any] = {}
        for port, source in data.items():
            if isinstance(source, dict) and not source.keys() <= StageSource.model_fields.keys():
                flat.update({f"{port}.{name}": each for name, each in source.items()})
            else:
                flat[port] = source
        return flat


class StageVariant(Table):
    """What a stage is under a `-c` name: a config, of the stage's own step or of another one that makes the same."""

    config: StrictStr
    step: StrictStr | None = None

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, data: Any) -> Any:
        return {"config": data} if isinstance(data, str) else data


class PipelineTable(Table):
    """`[pipeline]`."""

    name: StrictStr
    description: StrictStr = ""
    tags: Strings = ()


class PipelineManifest(ManifestFile):
    """One pipeline file."""

    pipeline: PipelineTable
    stages: Annotated[tuple[Stage, ...], Field(min_length=1)]
    configs: dict[StrictStr, dict[StrictStr, StageVariant]] = Field(default_factory=dict)
    """What `-c NAME` means for this pipeline, for every stage: `STAGE = "CONFIG"`, or
    `STAGE = { step = "STEP", config = "CONFIG" }` where another step takes its place."""

    @model_validator(mode="after")
    def _stages_in_order(self) -> Self:
        seen: set[str] = set()
        for stage in self.stages:
            if stage.name in seen:
                raise ValueError(f"stages: two stages are named {stage.name!r}; give each its own name")
            for port, source in stage.inputs.items():
                if source.stage is not None and source.stage not in seen:
                    raise ValueError(
                        f"stages: {stage.name}.{port} reads stage {source.stage!r}, which is not before it"
                    )
            seen.add(stage.name)
        for name, table in self.configs.items():
            for stage_name in table.keys() - seen:
                raise ValueError(f"configs.{name}: there is no stage {stage_name!r}")
            if missing := [stage.name for stage in self.stages if stage.name not in table]:
                raise ValueError(f"configs.{name}: names no config for stage {missing[0]!r}; it names one for each")
        return self

    @property
    def name(self) -> str:
        """What the pipeline goes by: `pipeline.name`, or `PACK:NAME` where that is taken."""
        return f"{self.pack}:{self.pipeline.name}" if self.hidden else self.pipeline.name
