"""A pipeline under test, and checks of its file, of its plans, and of its runs where the kit may run it."""

from __future__ import annotations

import re
from functools import cached_property

from nemotron_steps.cli.asked import Asked
from nemotron_steps.cli.request import Workbench
from nemotron_steps.errors import StepsError
from nemotron_steps.manifest.pipeline_models import PipelineManifest
from nemotron_steps.testing.step_subject import Ran, RunSubject
from nemotron_steps.testing.suite import NotApplicable, Suite, Unmet, told

_OWN_PATH = re.compile(r"(^|[=\['\",])(/|~[\w.-]*/|~$|[A-Za-z]:\\)")
"""From the root, a HOME (`~`, `~/models`, `~name/models`) or a drive, as a whole text or a value in it."""


class PipelineSubject(RunSubject):
    """What the checks of a pipeline ask. Without a config it is planned, and not run."""

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
def it_plans(subject: PipelineSubject) -> None:
    """With each `-c` and without, before there is data: steps, ports and types fit, and configs compose."""
    bench = Workbench(str(subject.folder / "home"), registry=subject.registry)
    for config in (None, *subject.manifest.configs):
        try:
            bench.plan(Asked((subject.manifest.name,), (), config), allow_unfilled=True)
        except StepsError as error:
            first = next(iter(getattr(error, "problems", ())), error)
            raise told(first, f"under '{config or 'default'}': ") from error


@SUITE.check("it_plans")
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
