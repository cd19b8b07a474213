"""What a run does again, goes on with or takes from another, and what it hands to a step."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.artifacts.backend import FsspecBackend
from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.errors import InterruptedRunError, StepFailedError
from nemotron_steps.resolver.plan import Instance, Plan
from nemotron_steps.runs import execute as execute_module
from nemotron_steps.runs.context import StepContext
from nemotron_steps.runs.execute import execute
from nemotron_steps.runs.report.data import read_report
from nemotron_steps.runs.run_folder import RunFolder, get_run
from tests.runs import runner_toy_steps
from tests.runs.runner_toy_plan import make_plan, run

Records = list[dict[str, Any]]


def states(result: Any) -> list[str]:
    return [step.state for step in result.steps]


def loaded(records: Records) -> list[int]:
    """The step at which each training began."""
    return [record["fields"]["step"] for record in records if record.get("name") == "loaded"]


def killed_at(index: int) -> Callable[[dict[str, Any]], None]:
    def listener(record: dict[str, Any]) -> None:
        if record["kind"] == "metrics" and record["index"] == index:
            raise KeyboardInterrupt

    return listener


def test_a_run_that_goes_on_where_another_stopped_has_the_metrics_and_samples_of_the_whole_step(
    store: ArtifactStore,
) -> None:
    whole = read_report(run(store, make={"rows": 21}).folder, store).steps[-1]
    with pytest.raises(InterruptedRunError):
        execute(make_plan(), store, listeners=[killed_at(4)])
    with pytest.raises(InterruptedRunError):
        execute(make_plan(), store, listeners=[killed_at(6)])
    (last,) = (step for step in read_report(run(store).folder, store).steps if step.key == "toy/train")
    assert list(dict(last.curves["loss"])) == [*range(1, 11)]
    assert (last.curves["loss"], last.samples) == (whole.curves["loss"], whole.samples)
    # Cached, under its own key and as the stage of a pipeline.
    plan = make_plan()
    stage = replace(plan, steps=(plan.steps[0], replace(plan.steps[1], key="stage")), goals=("stage",))
    for again in (plan, stage):
        cached = read_report(execute(again, store).folder, store).steps[-1]
        assert (cached.state, cached.curves, cached.summary) == ("cached", last.curves, last.summary)


def test_a_forced_run_that_was_stopped_goes_on_with_what_it_was_forced_to_make(store: ArtifactStore) -> None:
    run(store)
    with pytest.raises(InterruptedRunError):
        execute(make_plan(), store, force=True, listeners=[killed_at(6)])
    stopped = get_run(store, "latest")
    key = stopped.steps["toy/train"]["cache_key"]
    assert stopped.forced == {"toy/train": key}
    records: Records = []
    assert states(run(store, records, resume=stopped.id)) == ["cached", "ran"] and loaded(records) == [6]
    assert get_run(store, stopped.id).forced == {}
    assert states(run(store, resume=stopped.id)) == ["cached", "cached"]


@pytest.mark.parametrize(
    ("changed", "resumed", "noted", "began"),
    [
        ("code toy_steps.py", True, True, 6),
        ("code toy_steps.py", True, False, 6),  # a home from before work folders said what they depend on
        ("code toy_steps.py", False, True, 0),
        ("config learning_rate", True, True, 0),
    ],
)
def test_a_resumed_run_goes_on_from_its_checkpoints_if_code_alone_has_changed(
    store: ArtifactStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    changed: str,
    resumed: bool,
    noted: bool,
    began: int,
) -> None:
    with pytest.raises(InterruptedRunError):
        execute(make_plan(), store, listeners=[killed_at(6)])
    stopped = get_run(store, "latest")
    if not noted:
        (store.backend.local("work") / stopped.steps["toy/train"]["cache_key"] / "depends.json").unlink()
    depends_on = execute_module.depends_on
    now = lambda planned, inputs: {**depends_on(planned, inputs), changed: "another"}  # noqa: E731
    monkeypatch.setattr(execute_module, "depends_on", now)
    records: Records = []
    assert states(run(store, records, **({"resume": stopped.id} if resumed else {}))) == ["ran", "ran"]
    assert loaded(records) == [began]
    assert ("goes on from its checkpoints" in caplog.text) == (began > 0)


@pytest.mark.parametrize("broken", ["broken_report", "forgets_the_model"])
def test_a_step_whose_output_was_refused_is_asked_again_with_its_own_folder_as_it_left_it(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    train, bad = runner_toy_steps.train, getattr(runner_toy_steps, broken)

    def wrong(context: StepContext[Any]) -> None:
        (context.work / "checkpoint.json").write_text('{"step": 7, "sum": 0}')
        bad(context)

    monkeypatch.setattr(runner_toy_steps, "train", wrong)
    with pytest.raises(StepFailedError):
        run(store)
    monkeypatch.setattr(runner_toy_steps, "train", train)
    records: Records = []
    assert states(run(store, records)) == ["cached", "ran"] and loaded(records) == [7]


def test_a_remote_home_has_what_ran_while_the_rest_still_works_and_no_more_is_brought_here_than_is_used(
    tmp_path: Path,
) -> None:
    url = f"memory://attempts-{tmp_path.name}"
    here, there = (ArtifactStore(FsspecBackend(url, tmp_path / name)) for name in ("here", "there"))
    seen: list[dict[str, Any]] = []

    def look(record: dict[str, Any]) -> None:
        if (record["kind"], record["step"]) == ("step_started", "toy/train"):
            file = ArtifactStore(FsspecBackend(url, tmp_path / "third")).backend.read(f"runs/{run_id}/run.json")
            seen.append(json.loads(file or b"{}"))

    run_id = "20260102-030405-toy-0001"
    RunFolder(here, run_id).create("toy", {})
    execute(make_plan(), here, resume=run_id, listeners=[look])
    assert seen[0]["steps"]["toy/make"]["state"] == "ran"
    assert states(run(there)) == ["cached", "cached"]
    assert not list((tmp_path / "there").rglob("weights.json"))


def test_what_is_reused_keeps_who_made_it_and_the_run_that_reuses_it_names_its_own_input(
    store: ArtifactStore, tmp_path: Path
) -> None:
    first = run(store)
    made = store.find("toy/make/rows:v1")
    mine = tmp_path / "mine"
    mine.mkdir()
    for file in made.files:
        shutil.copy(store.open(made).path / file.path, mine / file.path)
    equal = store.add(mine, type_name=made.type, name="mine")
    assert equal.digest == made.digest and equal.producer is None
    records: Records = []
    again = run(store, records, rows="mine:v1")
    assert again.nothing_ran and [each["made_by"] for each in records if each["kind"] == "step_cached"] == [first.id]
    assert "mine:v1" in (again.folder / "plan.json").read_text()
    model = again.step("toy/train").outputs["model"]
    assert model.producer is not None and model.producer.run == first.id
    assert [edge.ref for edge in model.inputs] == ["toy/make/rows:v1"]
    own = run(store, rows="mine:v1", force=True)
    assert not own.nothing_ran and own.step("toy/train").outputs["model"].ref == model.ref


def test_of_instances_that_fail_the_first_is_told(store: ArtifactStore) -> None:
    make, train = make_plan().steps
    trained = [
        replace(train, key=f"train-{kind}", instance=Instance("train", {"fail": kind}), config={"fail": kind})
        for kind in ("nan", "bug")
    ]
    with pytest.raises(StepFailedError, match="the loss is NaN"):
        execute(Plan(steps=(make, *trained), goals=("train-nan", "train-bug"), name="toys"), store)
    assert [step["state"] for step in get_run(store, "latest").steps.values()] == ["ran", "failed", "failed"]
