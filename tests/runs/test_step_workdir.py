"""The work folder of a step: what an earlier attempt left in it, and what goes when."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.errors import ArtifactError, StepFailedError
from nemotron_steps.manifest.models import Produces, StepManifest
from nemotron_steps.runs.execute import execute
from nemotron_steps.runs.locks import hold
from nemotron_steps.runs.step_workdir import WorkFolder, artifact_name
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


def test_what_a_step_filled_is_there_for_the_next_attempt(work: WorkFolder) -> None:
    assert work.filled(PRODUCES) is None and not work.has_progress()
    fill(work)
    filled = work.filled(PRODUCES)
    assert filled is not None and filled[1:] == ({"steps": 10}, 1.5)
    assert {port: (slot.type, slot.attributes) for port, slot in filled[0].items()} == {
        "model": ("toy_model", {"rows": 3}),
        "report": ("eval_report", {}),
    }
    assert work.has_progress(), "only committing is left"
    with pytest.raises(ArtifactError) as caught:
        work.filled({"model": "toy_model"})
    assert caught.value.hints[0].startswith("rm ")


@pytest.mark.parametrize("committed", ["model", "report"])
def test_outputs_one_of_which_was_moved_into_the_home_are_filled_anew(work: WorkFolder, committed: str) -> None:
    fill(work)
    moved = work.path / "outputs" / committed
    moved.rename(work.path / "moved")
    assert work.filled(PRODUCES) is None


def test_an_attempt_begins_with_empty_outputs_and_its_own_folder_as_it_was(work: WorkFolder) -> None:
    fill(work)
    (work.work / "checkpoint").write_text("x")
    slots = work.prepare(PRODUCES)
    assert [list(slot.path.iterdir()) for slot in slots.values()] == [[], []]
    assert work.filled(PRODUCES) is None and (work.work / "checkpoint").is_file()
    fill(work)
    work.reject()
    assert work.filled(PRODUCES) is None and (work.work / "checkpoint").is_file()
    work.prepare(PRODUCES)
    assert work.filled(PRODUCES) is None, "what was refused is not filled because its folders are there again"


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


def test_an_artifact_of_a_pack_whose_folder_has_any_name_has_one_that_it_can_have() -> None:
    assert artifact_name("my pack (2):rl/dapo", "model") == "my-pack--2-/rl/dapo/model"
