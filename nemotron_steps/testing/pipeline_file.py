"""Checks of a pipeline's file: its stages, what they read of each other, and what can be typed and moved."""

from __future__ import annotations

import math
import re

from nemotron_steps.errors import StepsError
from nemotron_steps.testing.pipeline_subject import PipelineSubject
from nemotron_steps.testing.suite import NotApplicable, Suite, Unmet

_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_OWN_PATH = re.compile(r"(^|[=\['\",])(/|~[\w.-]*/|~$|[A-Za-z]:\\)")
"""From the root, a HOME (`~`, `~/models`, `~name/models`) or a drive, as a whole text or a value in it."""

FILE_SUITE: Suite[PipelineSubject] = Suite()


@FILE_SUITE.check()
def manifest_loads(subject: PipelineSubject) -> None:
    """The file is found, and strict."""
    try:
        assert subject.manifest
    except StepsError as error:
        raise Unmet(f"{error.code}: {error.what}", where=error.where, found=error.found) from error


@FILE_SUITE.check("manifest_loads")
def stages_are_described(subject: PipelineSubject) -> None:
    """The pipeline and each stage say what they are for."""
    if not subject.manifest.pipeline.description:
        raise Unmet("the pipeline has no description", where=subject.manifest.where("pipeline"))
    for index, stage in enumerate(subject.manifest.stages):
        if not stage.description:
            raise Unmet(f"stage '{stage.name}' has no description", where=subject.manifest.where("stages", index))


@FILE_SUITE.check("manifest_loads")
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


@FILE_SUITE.check("steps_exist")
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


@FILE_SUITE.check("manifest_loads")
def its_name_is_its_own(subject: PipelineSubject) -> None:
    """No step, and no pipeline of an earlier pack, has its plain name: it would be typed `PACK:NAME`."""
    if subject.manifest.hidden:
        raise Unmet(
            f"'{subject.manifest.pipeline.name}' is something else's name already",
            where=subject.manifest.where("pipeline", "name"),
            hint=f'name = "{subject.manifest.pipeline.name}_mine"',
        )


@FILE_SUITE.check("manifest_loads")
def names_can_be_typed(subject: PipelineSubject) -> None:
    """Stages and configs are words: `STAGE.key=value`, `--input STAGE.PORT=PATH` and `-c NAME` are read by them."""
    named = [(stage.name, ("stages", index)) for index, stage in enumerate(subject.manifest.stages)]
    named += [(config, ("configs", config)) for config in subject.manifest.configs]  # type: ignore[misc]
    for name, path in named:
        if not _WORD.fullmatch(name):
            raise Unmet(
                f"'{name}' cannot be named on the command line",
                where=subject.manifest.where(*path),
                hint="letters, digits, _ and -",
            )


@FILE_SUITE.check("manifest_loads")
def it_names_no_path_of_one_machine(subject: PipelineSubject) -> None:
    """No input or override is a path from the root or from a HOME: on another machine there is something else."""
    for index, stage in enumerate(subject.manifest.stages):
        given = [(source.ref, ("stages", index, "inputs")) for source in stage.inputs.values() if source.ref]
        # Before a key, + adds it and ~ takes it away: no home is meant.
        given += [(override.lstrip("+~"), ("stages", index, "overrides")) for override in stage.overrides]
        given += [(str(each), ("stages", index, "fan_out")) for values in stage.fan_out.values() for each in values]
        for text, path in given:
            if _OWN_PATH.search(text):
                raise Unmet(
                    f"stage '{stage.name}' names a path of one machine",
                    where=subject.manifest.where(*path),
                    found=text,
                    hint=f"leave it out, and give it with the run: --input {stage.name}.PORT=PATH",
                )


@FILE_SUITE.check("manifest_loads")
def bounds_can_be_met(subject: PipelineSubject) -> None:
    """There is a number that passes each check."""
    for index, stage in enumerate(subject.manifest.stages):
        for check in stage.checks:
            low = -math.inf if check.at_least is None else check.at_least
            high = math.inf if check.at_most is None else check.at_most
            if not low <= high:
                raise Unmet(
                    f"no number passes the check of '{check.metric}'",
                    where=subject.manifest.where("stages", index, "checks"),
                    found=check.expected,
                )


@FILE_SUITE.check("steps_exist")
def stages_take_what_they_are_given(subject: PipelineSubject) -> None:
    """Every input that a stage is given is a port of its step; of one that takes many, under a name."""
    for index, stage in enumerate(subject.manifest.stages):
        ports = subject.step_of(stage).inputs
        for port in stage.inputs:
            base, dot, _ = port.partition(".")
            if base not in ports or ports[base].many != bool(dot):
                raise Unmet(
                    f"{stage.name} has no input '{port}'",
                    where=subject.manifest.where("stages", index, "inputs"),
                    found=", ".join(f"{name}.NAME" if each.many else name for name, each in ports.items()) or "none",
                )


@FILE_SUITE.check("sources_are_wired", "stages_take_what_they_are_given")
def types_chain(subject: PipelineSubject) -> None:
    """What a stage makes is, or can be converted into, what a later one reads of it."""
    types = subject.bench.registry.types
    stages = {stage.name: stage for stage in subject.manifest.stages}
    for index, stage in enumerate(subject.manifest.stages):
        for port, source in stage.inputs.items():
            if source.stage is None:
                continue
            wanted = subject.step_of(stage).inputs[port.partition(".")[0]].type
            made = subject.step_of(stages[source.stage]).outputs
            outputs = [made[source.port]] if source.port else list(made.values())
            kinds = [kind for output in outputs for kind in (output.type, *output.becomes.values())]
            if all(types.path(kind, wanted) is None for kind in kinds):
                raise Unmet(
                    f"{stage.name}.{port} is a {wanted}, and stage '{source.stage}' makes none",
                    where=subject.manifest.where("stages", index, "inputs"),
                    found=", ".join(kinds) or "nothing",
                )


@FILE_SUITE.check("types_chain")
def variants_make_the_same(subject: PipelineSubject) -> None:
    """A step that takes a stage's place under a config has the ports that the stage reads, and makes what is read."""
    types = subject.bench.registry.types
    for config, table in subject.manifest.configs.items():
        for stage in subject.manifest.stages:
            step, other = subject.step_of(stage), subject.step_of(stage, config)
            if other.id == step.id:
                continue
            where = subject.manifest.where("configs", config, stage.name)
            absent = [port for port in stage.inputs if port.partition(".")[0] not in other.inputs]
            if absent:
                raise Unmet(f"under '{config}', {table[stage.name].step} has no input '{absent[0]}'", where=where)
            for output in step.produces:
                made = other.outputs.get(output.name)
                if made is None or types.path(made.type, output.type) is None:
                    raise Unmet(
                        f"under '{config}', {table[stage.name].step} makes no {output.type} '{output.name}'",
                        where=where,
                        found=", ".join(f"{each.name} ({each.type})" for each in other.produces) or "nothing",
                    )


@FILE_SUITE.check("sources_are_wired")
def no_stage_is_left_over(subject: PipelineSubject) -> None:
    """Where stages read each other, each of them reads one or is read: one that stands alone was forgotten."""
    edges = [
        (stage.name, source.stage) for stage in subject.manifest.stages for source in stage.inputs.values()
        if source.stage is not None
    ]  # fmt: skip
    if not edges:
        raise NotApplicable("no stage reads another")
    wired = {name for edge in edges for name in edge}
    for index, stage in enumerate(subject.manifest.stages):
        if stage.name not in wired:
            raise Unmet(
                f"stage '{stage.name}' reads no other stage, and none reads it",
                where=subject.manifest.where("stages", index),
                hint=f'inputs = {{ PORT = "{stage.name}" }} in the stage that reads it',
            )
