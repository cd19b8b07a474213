"""What is written down of a run whose process is gone."""

from pathlib import Path

import pytest

from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.runs.locks import hold
from nemotron_steps.runs.recorder import kept, record_death
from nemotron_steps.runs.run_folder import RunFolder, get_run, read_events

STATES = {"a": "ran", "b": "cached", "c": "reused", "d": "running", "e": "pending"}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(ArtifactStore(tmp_path / "home"), "r1")
    folder.update(folder.create("toy", {}), status="running", steps={key: {"state": s} for key, s in STATES.items()})
    return folder


def test_a_dead_run_is_journalled_once_with_what_its_steps_had_come_to(folder: RunFolder) -> None:
    store = ArtifactStore(folder.path.parents[1])
    for _ in range(2):
        assert record_death(store, "r1", "killed by SIGKILL").hints[0].startswith("dmesg")
    (finished,) = read_events(store, "r1", "events")[-1:]
    assert (finished["kind"], finished["status"]) == ("run_finished", "failed")
    assert (finished["ran"], finished["cached"]) == (1, 2)  # what another run made meanwhile was there as well
    info = get_run(store, "r1")
    assert {key: step["state"] for key, step in info.steps.items()} == {**STATES, "d": "failed"}
    assert [record["kind"] for record in read_events(store, "r1")].count("run_finished") == 1


def test_a_run_that_somebody_works_on_is_left_to_them(folder: RunFolder) -> None:
    store = ArtifactStore(folder.path.parents[1])
    with hold(folder.lock, {}, lambda holder: None):
        record_death(store, "r1", "exit code 1")
    assert folder.load().status == "running" and not read_events(store, "r1")


def test_no_checkpoint_is_promised_that_is_not_there(tmp_path: Path) -> None:
    steps, store = {"a": {"state": "ran"}, "b": {"state": "running", "cache_key": "k"}}, ArtifactStore(tmp_path)
    assert kept(steps, store) == "kept: a; b has no checkpoint yet and begins anew"
    for name in ("step_00000004", "step_00000012", "step_00000016.partial"):
        (tmp_path / "work/k/work/checkpoints" / name).mkdir(parents=True)
    assert kept(steps, store) == "kept: a; b up to checkpoint 12"
