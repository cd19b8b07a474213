"""Checks of a pipeline: that it loads, is described, and plans under each of its configs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from nemotron_steps.cli.request import Asked, Workbench
from nemotron_steps.errors import StepsError
from nemotron_steps.manifest.pipeline_models import PipelineManifest
from nemotron_steps.testing.suite import NotApplicable, Suite, Unmet


@dataclass
class PipelineSubject:
    """What the checks of a pipeline ask.

    Args:
        name: of the pipeline.
        folder: for a home.
    """

    name: str
    folder: Path

    @cached_property
    def bench(self) -> Workbench:
        """What commands plan with."""
        return Workbench(str(self.folder / "home"))

    @cached_property
    def manifest(self) -> PipelineManifest:
        """The pipeline's. Raises the error that it has, or that there is none."""
        return self.bench.registry.pipeline(self.name)

    def plan(self, config: str | None) -> None:
        """Plan it without data. Unmet with the first mistake."""
        try:
            self.bench.plan(Asked((self.manifest.name,), config=config), allow_unfilled=True)
        except StepsError as error:
            first = next(iter(getattr(error, "problems", ())), error)
            raise Unmet(
                f"under '{config or 'default'}': {first.what}",
                where=first.where,
                found=first.found,
                hint="; ".join(first.hints) or None,
            ) from error


SUITE: Suite[PipelineSubject] = Suite()


@SUITE.check()
def manifest_loads(subject: PipelineSubject) -> None:
    """The file is found, and strict."""
    try:
        assert subject.manifest
    except StepsError as error:
        raise Unmet(f"{error.code}: {error.what}", where=error.where, found=error.found) from error


@SUITE.check("manifest_loads")
def stages_are_described(subject: PipelineSubject) -> None:
    """The pipeline and each stage say what they are for."""
    if not subject.manifest.pipeline.description:
        raise Unmet("the pipeline has no description", where=subject.manifest.where("pipeline"))
    for index, stage in enumerate(subject.manifest.stages):
        if not stage.description:
            raise Unmet(f"stage '{stage.name}' has no description", where=subject.manifest.where("stages", index))


@SUITE.check("manifest_loads")
def steps_exist(subject: PipelineSubject) -> None:
    """Every stage, under every config, names a step that is there."""
    named: list[tuple[str, tuple[str | int, ...]]] = [
        (stage.step, ("stages", index, "step")) for index, stage in enumerate(subject.manifest.stages)
    ]
    named += [
        (variant.step, ("configs", config, stage))
        for config, table in subject.manifest.configs.items()
        for stage, variant in table.items()
        if variant.step is not None
    ]
    for step_id, path in named:
        try:
            subject.bench.registry.step(step_id)
        except StepsError as error:
            raise Unmet(error.what, where=subject.manifest.where(*path), hint="; ".join(error.hints)) from error


@SUITE.check("sources_are_wired")
def its_default_plans(subject: PipelineSubject) -> None:
    """Without `-c` it type-checks, whatever data is still to be given."""
    subject.plan(None)


@SUITE.check("its_default_plans")
def every_config_plans(subject: PipelineSubject) -> None:
    """With each `-c` it names, too."""
    if not subject.manifest.configs:
        raise NotApplicable("the pipeline names no configs")
    for config in subject.manifest.configs:
        subject.plan(config)


@SUITE.check("steps_exist")
def sources_are_wired(subject: PipelineSubject) -> None:
    """A stage reads ports that an earlier stage has."""
    stages = {stage.name: subject.bench.registry.step(stage.step) for stage in subject.manifest.stages}
    for index, stage in enumerate(subject.manifest.stages):
        for port, source in stage.inputs.items():
            if source.stage is not None and source.port is not None and source.port not in stages[source.stage].outputs:
                raise Unmet(
                    f"{stage.name}.{port} reads '{source.stage}.{source.port}', which that step does not make",
                    where=subject.manifest.where("stages", index, "inputs", port),
                    found=", ".join(stages[source.stage].outputs),
                )
