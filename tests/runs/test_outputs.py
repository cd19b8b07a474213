"""What a step leaves as its outputs: what is committed of it, under which name, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.errors import StepFailedError
from nemotron_steps.manifest.models import Produces, StepManifest
from nemotron_steps.runs.execute import execute
from nemotron_steps.runs.step_workdir import artifact_name
from tests.runs.runner_toy_plan import TRAIN, make_plan, run


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
