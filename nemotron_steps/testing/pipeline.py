"""Checks of a pipeline in use: it plans under each of its configs, is shown, and runs where the kit may run it."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr, redirect_stdout

from nemotron_steps.testing.pipeline_file import FILE_SUITE
from nemotron_steps.testing.pipeline_subject import PipelineSubject
from nemotron_steps.testing.step_subject import Ran
from nemotron_steps.testing.suite import NotApplicable, Suite, Unmet

__all__ = ["SUITE", "PipelineSubject"]

SUITE: Suite[PipelineSubject] = Suite(FILE_SUITE)


@SUITE.check("types_chain", "stages_take_what_they_are_given", "it_names_no_path_of_one_machine")
def its_default_plans(subject: PipelineSubject) -> None:
    """Without `-c` it type-checks, whatever data is still to be given."""
    subject.plan(None)


@SUITE.check("its_default_plans", "variants_make_the_same")
def every_config_plans(subject: PipelineSubject) -> None:
    """With each `-c` it names, too."""
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


@SUITE.check("its_default_plans", "names_can_be_typed")
def commands_show_it(subject: PipelineSubject) -> None:
    """`steps list` shows it in a line, and `--dry-run` shows each stage, before there is data."""
    from nemotron_steps.cli.main import steps

    if not subject.manifest.pipeline.description.isprintable():
        raise Unmet("the description is more than a line of text", where=subject.manifest.where("pipeline"))
    for words in (["list", "--json"], ["run", subject.manifest.name, "--dry-run", "--json"]):
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            code = steps([*words, "--home", str(subject.folder / "home")] if "run" in words else words)
        if code:
            raise Unmet(f"`steps {' '.join(words)}` fails", found=(err.getvalue() or out.getvalue())[:400])
        shown = json.loads(out.getvalue())
        if subject.manifest.name not in {each["name"] for each in shown.get("pipelines", [shown])}:
            raise Unmet(f"`steps {words[0]}` does not show it")


@SUITE.check("its_default_plans", "names_can_be_typed")
def runs(subject: PipelineSubject) -> None:
    """With the config that the kit was given it runs to its end."""
    assert subject.words(subject.folder)
    ran = subject.first
    if not ran.commands:
        raise Unmet(f"the run ended its process with {ran.code}", found=ran.output[-400:])
    if ran.commands[0]["code"]:
        error = ran.error() or {}
        raise Unmet(
            f"the run fails: {error.get('what', ran.commands[0]['err'][-400:])}",
            where=error.get("where"),
            found=error.get("found"),
            hint="; ".join(error.get("hints", ())) or None,
        )


@SUITE.check("runs")
def a_second_run_makes_nothing(subject: PipelineSubject) -> None:
    """The same command again finds every stage made."""
    again = [step["key"] for step in subject.first.result(1)["steps"] if step["state"] != "cached"]
    if again:
        raise Unmet(f"a second run makes {', '.join(again)} again", hint="nothing of a stage may depend on the time")


@SUITE.check("runs")
def same_seed_same_outputs(subject: PipelineSubject) -> None:
    """In another home, by another process, every stage makes the same bytes."""
    home = subject.folder / "second" / "deeper"
    ran = subject.process("second", [subject.words(home)], home)
    first, second = _outputs(subject.first), _outputs(ran)
    for key, digest in first.items():
        if second.get(key) != digest:
            raise Unmet(f"{key} is not the same in another home", hint="a seed in the config; no paths, no times")


@SUITE.check("same_seed_same_outputs")
def goes_on_after_a_kill(subject: PipelineSubject) -> None:
    """Killed with SIGKILL at the last stage's first file, the same command goes on and ends the same."""
    home = subject.folder / "killed"
    step = subject.step_of(subject.manifest.stages[-1], subject.config).id
    killed = subject.process("killed", [subject.words(home)], home, step=step, at_write=1)
    if killed.commands:
        raise NotApplicable("its last stage writes no file of its own")
    ran = subject.process("after the kill", [subject.words(home)], home)
    if not ran.commands or ran.commands[0]["code"]:
        error = (ran.error() if ran.commands else None) or {}
        raise Unmet(
            f"after a kill the same command fails: {error.get('what', ran.output[-300:])}",
            hint="clear the output folder first; leave no locks",
        )
    first, last = _outputs(subject.first), _outputs(ran)
    differing = sorted(key for key in first.keys() | last.keys() if first.get(key) != last.get(key))
    if differing:
        raise Unmet(
            "after a kill the same command makes something else",
            found=", ".join(differing),
            hint="append to nothing in context.work",
        )


@SUITE.check("runs")
def checks_find_their_numbers(subject: PipelineSubject) -> None:
    """Every metric that a check names is one that its stage reports."""
    from nemotron_steps.artifacts.store import ArtifactStore
    from nemotron_steps.runs.run_folder import read_events
    from nemotron_steps.runs.stage_checks import flat_numbers

    # By the plan: a stage that is fanned out is a step for each value, with a key of its own.
    checked = {step.key: step.checks for step in subject.ran_plan.steps if step.checks}
    if not checked:
        raise NotApplicable("no stage has checks")
    result = subject.first.result()
    store = ArtifactStore(subject.first.home)
    for step in result["steps"]:
        records = [each for each in read_events(store, result["run"], "metrics") if each.get("step") == step["key"]]
        known = {*flat_numbers(step["summary"]), *(name for each in records for name in flat_numbers(each["values"]))}
        for check in checked.pop(step["key"], ()):
            if check.metric not in known:
                raise Unmet(
                    f"stage '{step['key']}' reports no '{check.metric}', which a check asks for",
                    found=", ".join(sorted(known)[:12]) or "no numbers",
                )
    if checked:
        raise Unmet(f"the run has no step '{next(iter(checked))}', which has checks")


@SUITE.check("runs")
def it_writes_into_its_home_only(subject: PipelineSubject) -> None:
    """Nothing is left where somebody happens to work."""
    place = subject.folder / "processes" / "first" / "cwd"
    left = sorted(str(path.relative_to(place)) for path in place.rglob("*"))
    if left:
        raise Unmet("a run leaves files in the working directory", found=", ".join(left[:5]))


def _outputs(ran: Ran) -> dict[str, str]:
    """`STAGE.PORT` → digest, of a run."""
    from nemotron_steps.artifacts.store import ArtifactStore

    store = ArtifactStore(ran.home)
    return {
        f"{step['key']}.{port}": store.find(output["ref"]).digest
        for step in ran.result()["steps"]
        for port, output in step["outputs"].items()
    }
