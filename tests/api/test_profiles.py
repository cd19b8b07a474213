"""Runs under a profile of env.toml, from Python: attached, left alone, cancelled, and gone on with elsewhere."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import ClassVar

import pytest

from nemotron_steps import open_run, run
from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.config.profiles import OpenProfile
from nemotron_steps.errors import InterruptedRunError
from nemotron_steps.runs.executors import base
from nemotron_steps.runs.executors.detached import DetachedExecutor
from nemotron_steps.runs.run_folder import RunFolder, get_run
from tests.cli.conftest import TOY_PACK

PROFILES = """
[here]
executor = "local"

[cluster]
executor = "other"

[large]
extends = "cluster"
nodes = 4

[queue]
executor = "queue"
"""
ASKED = {"target": "toy/train", "config": "tiny"}


class OtherProcess(DetachedExecutor):
    """Jobs are processes of this machine, as those of a cluster are of others."""

    profile_model = OpenProfile
    launches: ClassVar[list[base.Launch]] = []

    def submit(self, launch: base.Launch) -> str:
        self.launches.append(launch)
        return super().submit(launch)


class Queue:
    """Nothing it takes ever begins."""

    def submit(self, launch: base.Launch) -> str:
        return "job-1"

    def status(self, job: str) -> base.JobStatus:
        return base.JobStatus(base.JobState.PENDING)

    def cancel(self, job: str) -> None:
        return None


@pytest.fixture(autouse=True)
def cluster(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> list[base.Launch]:
    """What has been handed to the executor of the profiles `cluster` and `large`."""
    monkeypatch.setenv("STEPS_PATH", str(TOY_PACK))
    monkeypatch.setenv("PYTHONPATH", str(TOY_PACK))
    monkeypatch.syspath_prepend(str(TOY_PACK))
    monkeypatch.setattr(OtherProcess, "launches", [])
    points = [
        EntryPoint("other", f"{__name__}:OtherProcess", base.ENTRY_POINT_GROUP),
        EntryPoint("queue", f"{__name__}:Queue", base.ENTRY_POINT_GROUP),
    ]
    monkeypatch.setattr(base, "entry_points", lambda group: points if group == base.ENTRY_POINT_GROUP else [])
    (workplace / "env.toml").write_text(PROFILES)
    return OtherProcess.launches


def test_a_run_elsewhere_is_followed_to_its_end(cluster: list[base.Launch], capsys: pytest.CaptureFixture[str]) -> None:
    result = run(**ASKED, profile="cluster", steps=3)
    shown = capsys.readouterr().out
    assert f"submitted as {result.id} (other job " in shown and "toy/train" in shown
    assert result.status == "done" and list(result.metrics["loss"]) == [1, 2, 3]
    assert result.outputs["model"].path.is_dir()
    assert [launch.attached for launch in cluster] == [True]


def test_a_run_that_nobody_waits_for_is_looked_at_waited_for_and_gone_on_with(cluster: list[base.Launch]) -> None:
    left = run(**ASKED, profile="here", wait=False, progress=False, seconds_per_step=0.3, steps=3)
    assert left.status in ("submitted", "running")
    assert left.wait(progress=False) is left
    assert left.status == "done" and list(left.metrics["loss"]) == [1, 2, 3]
    assert not cluster
    # Gone on with, it may have another place.
    again = run(resume=left.id, profile="large", wait=False, progress=False)
    assert again.id == left.id and [launch.profile.nodes for launch in cluster] == [4]
    assert again.wait(progress=False).status == "done"


@pytest.mark.parametrize("said", ["submitted", "running"])
def test_a_run_whose_job_died_without_a_word_is_killed(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    queued = run(**ASKED, profile="queue", wait=False, progress=False)
    store = ArtifactStore()
    RunFolder(store, queued.id).update(get_run(store, queued.id), status=said, host="another-machine")
    assert queued.status == said
    monkeypatch.setattr(Queue, "status", lambda self, job: base.JobStatus(base.JobState.LOST))
    assert queued.status == "killed"


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT is an interrupt, also where the tests run in the background of a shell, which ignores it there."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_cancels_the_job_that_is_waited_for(cluster: list[base.Launch]) -> None:
    def interrupt() -> None:
        while not cluster:
            time.sleep(0.05)
        _until_running(cluster[0].run_id)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(InterruptedRunError, match="the job was asked to stop"):
        run(**ASKED, profile="cluster", progress=False, seconds_per_step=20)
    with pytest.raises(InterruptedRunError):
        open_run(cluster[0].run_id).wait(progress=False)


def _until_running(run_id: str) -> None:
    deadline = time.monotonic() + 60
    while open_run(run_id).status != "running":
        assert time.monotonic() < deadline
        time.sleep(0.05)
