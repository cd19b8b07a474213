"""A pipeline under test, and checks of its file, of its plans, and of its runs where the kit may run it."""

from __future__ import annotations

import re
from contextlib import chdir
from functools import cached_property
from typing import TYPE_CHECKING

from nemotron_steps.cli.asked import Asked
from nemotron_steps.cli.request import Workbench
from nemotron_steps.errors import StepsError
from nemotron_steps.manifest.pipeline_models import PipelineManifest
from nemotron_steps.testing.step_subject import Ran, RunSubject
from nemotron_steps.testing.suite import NotApplicable, Suite, Unmet, told

if TYPE_CHECKING:
    from nemotron_steps.resolver.plan import Plan

_OWN_PATH = re.compile(r"(^|[=\['\",])(/|~[\w.-]*/|~$|[A-Za-z]:\\)")
"""From the root, a HOME (`~`, `~/models`, `~name/models`) or a drive, as a whole text or a value in it."""


class PipelineSubject(RunSubject):
    """What the checks of a pipeline ask. Without a config it is planned, and not run."""

    @cached_property
    def bench(self) -> Workbench:
        """What commands plan with."""
        return Workbench(str(self.folder / "home"), registry=self.registry)

    @property
    def config_name(self) -> str:
        """The config of runs. NotApplicable where the kit was given none."""
        if self.config is None:
            raise NotApplicable(f'pipeline_conformance("{self.name}", run="tiny") runs it as well')
        return self.config

    @cached_property
    def manifest(self) -> PipelineManifest:
        """The pipeline's. Raises the error that it has, or that there is none."""
        return self.registry.pipeline(self.name)

    def plan(self, config: str | None, *, bench: Workbench | None = None) -> Plan:
        """Plan it without data. Unmet with the first mistake."""
        try:
            return (bench or self.bench).plan(Asked((self.manifest.name,), (), config), allow_unfilled=True)
        except StepsError as error:
            first = next(iter(getattr(error, "problems", ())), error)
            raise told(first, f"under '{config or 'default'}': ") from error


SUITE: Suite[PipelineSubject] = Suite()


@SUITE.check()
def manifest_loads(subject: PipelineSubject) -> None:
    """The file is found, and strict; no step, and no pipeline of an earlier pack, has its plain name."""
    try:
        manifest = subject.manifest
    except StepsError as error:
        raise told(error) from error
    if manifest.hidden:
        name = manifest.pipeline.name
        where = manifest.where("pipeline", "name")
        raise Unmet(f"'{name}' is something else's name already", where=where, hint=f'name = "{name}_mine"')


@SUITE.check("manifest_loads")
def it_is_described(subject: PipelineSubject) -> None:
    """The pipeline and each stage say in a line what they are for."""
    manifest = subject.manifest
    if not manifest.pipeline.description or not manifest.pipeline.description.isprintable():
        raise Unmet("the description of the pipeline is not a line of text", where=manifest.where("pipeline"))
    for index, stage in enumerate(manifest.stages):
        if not stage.description:
            raise Unmet(f"stage '{stage.name}' has no description", where=manifest.where("stages", index))


@SUITE.check("manifest_loads")
def it_names_no_path_of_one_machine(subject: PipelineSubject) -> None:
    """No input or override is a path from the root or from a HOME: on another machine there is something else."""
    for index, stage in enumerate(subject.manifest.stages):
        texts = [(source.ref, "inputs") for source in stage.inputs.values() if source.ref]
        # Before a key, + adds it and ~ takes it away: no home is meant.
        texts += [(override.lstrip("+~"), "overrides") for override in stage.overrides]
        texts += [(str(each), "fan_out") for values in stage.fan_out.values() for each in values]
        for text, key in texts:
            if _OWN_PATH.search(text):
                raise Unmet(
                    f"stage '{stage.name}' names a path of one machine",
                    where=subject.manifest.where("stages", index, key),
                    found=text,
                    hint=f"leave it out, and give it with the run: --input {stage.name}.PORT=PATH",
                )


@SUITE.check("manifest_loads")
def its_default_plans(subject: PipelineSubject) -> None:
    """Without `-c`, before there is data: steps and ports are there, what is made is what is read, configs compose."""
    subject.plan(None)


@SUITE.check("its_default_plans")
def every_config_plans(subject: PipelineSubject) -> None:
    """With each `-c` it names, too, whatever step takes a stage's place under it."""
    if not subject.manifest.configs:
        raise NotApplicable("the pipeline names no configs")
    for config in subject.manifest.configs:
        subject.plan(config)


@SUITE.check("every_config_plans")
def tiny_needs_no_gpu(subject: PipelineSubject) -> None:
    """`-c tiny` is for two CPU cores, where everybody can try the pipeline."""
    if "tiny" not in subject.manifest.configs:
        raise NotApplicable("the pipeline has no config `tiny`")
    for step in subject.plan("tiny").steps:
        cluster = step.config.get("cluster")
        gpus = cluster.get("gpus_per_node") if isinstance(cluster, dict) else None
        if gpus:
            raise Unmet(
                f"stage '{step.key}' asks for {gpus} GPUs under 'tiny'",
                where=subject.manifest.where("configs", "tiny", step.key),
                hint="cluster.gpus_per_node=0, a small model, few steps",
            )


@SUITE.check("its_default_plans")
def its_plan_is_reproducible(subject: PipelineSubject) -> None:
    """Planned again, for another home and in another working directory, it is the same: steps, sources and configs."""
    first = subject.plan(None).to_dict(with_config=True)["steps"]
    with chdir(subject.folder):
        bench = Workbench(str(subject.folder / "another"), registry=subject.registry)
        again = subject.plan(None, bench=bench).to_dict(with_config=True)["steps"]
    for step, other in zip(first, again, strict=True):
        if step != other:
            keys = [key for key in step["values"] if step["values"][key] != other["values"].get(key)]
            raise Unmet(
                f"stage '{step['key']}' is planned otherwise the second time",
                found=", ".join(keys) or None,
                hint="no default of a config comes from the machine, the folder or the clock",
            )


@SUITE.check("its_default_plans")
def runs(subject: PipelineSubject) -> None:
    """With the config that the kit was given it runs to its end."""
    error = subject.first.error()
    if error is None and subject.first.commands[0]["code"]:
        error = {"what": subject.first.commands[0]["err"][-400:]}
    if error is not None:
        raise told(error, "the run fails: ")


@SUITE.check("runs")
def a_second_run_makes_nothing(subject: PipelineSubject) -> None:
    """The same command again finds every stage made."""
    again = [step["key"] for step in subject.first.result(1)["steps"] if step["state"] != "cached"]
    if again:
        raise Unmet(f"a second run makes {', '.join(again)} again", hint="nothing of a stage may depend on the time")


@SUITE.check("runs")
def same_seed_same_outputs(subject: PipelineSubject) -> None:
    """In another home, by another process with other hashes, every stage makes the same bytes."""
    first, second = _outputs(subject.first), _outputs(subject.second)
    for key, digest in first.items():
        if second.get(key) != digest:
            raise Unmet(f"{key} is not the same in another home", hint="a seed in the config; no paths, no times")


def _outputs(ran: Ran) -> dict[str, str]:
    """`STAGE.PORT` → digest, of a run."""
    from nemotron_steps.artifacts.store import ArtifactStore

    store = ArtifactStore(ran.home)
    return {
        f"{step['key']}.{port}": store.find(output["ref"]).digest
        for step in ran.result()["steps"]
        for port, output in step["outputs"].items()
    }
