"""The work folder of a step: what an earlier attempt left in it, and what goes when."""

from dataclasses import replace
from pathlib import Path

import pytest

from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.errors import StepFailedError
from nemotron_steps.manifest.models import Produces, StepManifest
from nemotron_steps.runs.execute import execute
from nemotron_steps.runs.locks import hold
from nemotron_steps.runs.step_workdir import WorkFolder
from tests.runs.runner_toy_plan import TRAIN, make_plan, run

PRODUCES = {"model": "toy_model", "report": "eval_report"}


@pytest.fixture
def work(tmp_path: Path) -> WorkFolder:
    return WorkFolder(tmp_path / "work", "0" * 32)


def fill(work: WorkFolder) -> None:
    slots = work.prepare(PRODUCES)
    for slot in slots.values():
        (slot.path / "file").write_text("x")
    slots["model"].attributes["rows"] = 3
    work.mark_filled(slots, {"steps": 10}, 1.5)


def test_what_a_kill_left_is_removed_unless_somebody_works_in_it(work: WorkFolder) -> None:
    fill(work)
    with hold(work.lock, {}, lambda holder: None):
        work.remove_if_abandoned()
        assert work.path.is_dir()
    work.remove_if_abandoned()
    assert not work.path.exists() and work.lock.is_file()


def test_invalid_output_is_not_committed_and_the_step_runs_again(store: ArtifactStore) -> None:
    with pytest.raises(StepFailedError, match="not a valid eval_report") as caught:
        run(store, entry="tests.runs.runner_toy_steps:broken_report")
    assert caught.value.found == "'many'"
    assert [a.name for a in store.list_artifacts() if a.name.endswith("report")] == []
    with pytest.raises(StepFailedError, match="not a valid eval_report"):
        run(store, entry="tests.runs.runner_toy_steps:broken_report")


def test_a_required_output_left_empty_fails_the_step_and_nothing_of_it_is_committed(store: ArtifactStore) -> None:
    with pytest.raises(StepFailedError, match="left its output 'model' empty"):
        run(store, entry="tests.runs.runner_toy_steps:forgets_the_model")
    assert [artifact.name for artifact in store.list_artifacts()] == ["toy/make/rows"]
    assert [step.state for step in run(store).steps] == ["cached", "ran"]


def test_an_output_that_need_not_be_may_be_left_empty(store: ArtifactStore) -> None:
    produces = (Produces(type="toy_model", name="model", required=False), Produces(type="eval_report", name="report"))
    plan = make_plan(entry="tests.runs.runner_toy_steps:forgets_the_model")
    manifest = StepManifest(step=plan.steps[1].manifest.step, consumes=TRAIN.consumes, produces=produces)
    train = replace(plan.steps[1], manifest=manifest)
    result = execute(replace(plan, steps=(plan.steps[0], train)), store)
    assert list(result.step("toy/train").outputs) == ["report"]
