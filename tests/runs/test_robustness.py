"""The runner killed, raced, interrupted and out of disk: in processes of their own, with real signals."""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import nemotron_steps.runs.execute as execute_module
from nemotron_steps.artifacts.backend import Backend
from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.errors import InterruptedRunError
from nemotron_steps.runs.run_folder import get_run, list_runs, read_events
from nemotron_steps.runs.step_workdir import WorkFolder
from tests.runs import runner_toy_plan
from tests.runs.runner_toy_plan import run

SETTINGS = ("make.delay=0.01", "train.delay=0.03")


class Child:
    """The toy command line in a forked process, its output in a file. Forked, so that no import blurs the timing."""

    def __init__(self, home: Path, *settings: str, setup: Callable[[], None] = lambda: None) -> None:
        home.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp()
        self._file = Path(name)
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            sys.stdout = os.fdopen(1, "w")
            code = 70
            try:
                setup()
                code = runner_toy_plan.main([str(home), *settings])
            finally:
                os._exit(code)
        os.close(descriptor)

    @property
    def output(self) -> str:
        return self._file.read_text()

    def wait_for(self, text: str) -> None:
        """Until the output contains `text`."""
        deadline = time.monotonic() + 60
        while text not in self.output:
            assert time.monotonic() < deadline and self.running(), f"never said {text!r}: {self.output}"
            time.sleep(0.005)

    def running(self) -> bool:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode is None

    def send(self, number: signal.Signals) -> None:
        if self.running():
            os.kill(self.pid, number)

    def finish(self) -> str:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.output


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """While this file exists, toy/train waits after its fourth step."""
    path = tmp_path / "gate"
    path.touch()
    monkeypatch.setenv("TOY_GATE", str(path))
    return path


def contents(home: Path) -> dict[str, str]:
    """Reference → digest of every artifact, each verified byte by byte."""
    store = ArtifactStore(home)
    artifacts = store.list_artifacts()
    assert all(store.verify(artifact) == [] for artifact in artifacts)
    return {artifact.ref: artifact.digest for artifact in artifacts}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    home = tmp_path_factory.mktemp("unbroken")
    child = Child(home, *SETTINGS)
    assert "run done" in child.finish()
    return contents(home)


def test_killed_at_random_moments_it_ends_with_the_same_artifacts(tmp_path: Path, unbroken: dict[str, str]) -> None:
    generator = random.Random(0)
    home = tmp_path / "home"
    killed = 0
    # Nothing is repaired between kills: each attempt goes on from wherever the last one died.
    for _ in range(20):
        child = Child(home, *SETTINGS)
        time.sleep(generator.uniform(0.0, 0.25))
        child.send(signal.SIGKILL)
        output = child.finish()
        killed += child.returncode == -signal.SIGKILL
        for artifact in ArtifactStore(home).list_artifacts():
            assert ArtifactStore(home).verify(artifact) == [], output
    output = Child(home, *SETTINGS).finish()
    assert contents(home) == unbroken, output
    assert killed >= 3
    statuses = [info.status for info in list_runs(ArtifactStore(home))]
    assert statuses[-1] == "done" and "killed" in statuses
    assert list((home / "work").glob("*/")) == [] and list((home / "artifacts/staging").glob("*")) == []


COMMIT_SEQUENCE: dict[str, type | ModuleType] = {
    "mark_filled": WorkFolder,
    "publish": ArtifactStore,
    "commit_tree": Backend,
    "_new_version": ArtifactStore,
    "remember": execute_module,
    "remove": WorkFolder,
}


@pytest.mark.parametrize("moment", COMMIT_SEQUENCE)
def test_killed_at_every_step_of_committing(
    tmp_path: Path, unbroken: dict[str, str], monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """SIGKILL on entering and on leaving each function of the commit sequence, at its first and second call."""
    home = tmp_path / "home"
    original = getattr(COMMIT_SEQUENCE[moment], moment)

    def run_until_killed(call: int, *, before: bool) -> int:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == call and before:
                os.kill(os.getpid(), signal.SIGKILL)
            result = original(*args, **kwargs)
            if calls == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        calls = 0
        child = os.fork()
        if child == 0:
            setattr(COMMIT_SEQUENCE[moment], moment, wrapper)
            run(ArtifactStore(home))
            os._exit(0)
        return os.waitpid(child, 0)[1]

    codes = [run_until_killed(call, before=before) for call in (1, 2) for before in (True, False)]
    assert codes.count(signal.SIGKILL) >= 2, codes
    result = run(ArtifactStore(home))
    assert {step.state for step in result.steps} <= {"ran", "cached"}
    # Without delays the cache keys are not those of the unbroken run; the content is.
    assert sorted(contents(home).values()) == sorted(unbroken.values())
    assert list((home / "work").glob("*/")) == []


@pytest.mark.parametrize("moment", ["commit_tree", "_new_version", "remember", "remove"])
def test_asked_to_stop_amid_committing_it_stops_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    original = getattr(COMMIT_SEQUENCE[moment], moment)

    def stop_first(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.undo()
        signal.raise_signal(signal.SIGTERM)
        return original(*args, **kwargs)

    store = ArtifactStore(tmp_path)
    monkeypatch.setattr(COMMIT_SEQUENCE[moment], moment, stop_first)
    with pytest.raises(InterruptedRunError, match="interrupted by SIGTERM; kept: toy/make"):
        run(store)
    assert [step.state for step in run(store).steps] == ["cached", "ran"]


def test_two_runs_of_the_same_artifact_one_works_and_the_other_reuses(tmp_path: Path, gate: Path) -> None:
    home = tmp_path / "home"
    first = Child(home)
    first.wait_for("step 4:")
    second = Child(home)
    second.wait_for("another run works on the same artifact (run ")
    gate.unlink()
    output_first, output_second = first.finish(), second.finish()
    assert (first.returncode, second.returncode) == (0, 0)
    assert "[toy/train] reuses what the other run made: model = toy/train/model:v1" in output_second
    assert "[toy/train] done" in output_first and "step 1:" not in output_second
    assert sorted(contents(home)) == ["toy/make/rows:v1", "toy/train/model:v1", "toy/train/report:v1"]


def test_waiting_run_takes_over_when_the_working_one_is_killed(tmp_path: Path, gate: Path) -> None:
    home = tmp_path / "home"
    first = Child(home)
    first.wait_for("step 4:")
    second = Child(home)
    second.wait_for("waiting for it")
    first.send(signal.SIGKILL)
    gate.unlink()
    output = second.finish()
    assert second.returncode == 0 and "continues from its work folder" in output
    assert "loaded: step=4" in output and "step 10:" in output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interruption_is_journalled_exits_130_and_resumes(tmp_path: Path, gate: Path, number: signal.Signals) -> None:
    home = tmp_path / "home"
    child = Child(home)
    child.wait_for("step 4:")
    child.send(number)
    output = child.finish()
    assert child.returncode == 130 and f"interrupted by {number.name}" in output
    store = ArtifactStore(home)
    info = get_run(store, "latest")
    assert (info.status, info.steps["toy/make"]["state"], info.steps["toy/train"]["state"]) == (
        "interrupted",
        "ran",
        "interrupted",
    )
    assert read_events(store, info.id)[-1]["status"] == "interrupted"
    assert f"steps run --resume {info.id}" in output
    gate.unlink()
    resumed = Child(home, f"resume={info.id}")
    output = resumed.finish()
    assert resumed.returncode == 0 and "loaded: step=4" in output
    assert get_run(store, info.id).status == "done"


def test_run_that_is_being_worked_on_cannot_be_resumed_twice(tmp_path: Path, gate: Path) -> None:
    home = tmp_path / "home"
    first = Child(home)
    first.wait_for("step 4:")
    info = get_run(ArtifactStore(home), "latest")
    assert info.status == "running" and info.pid == first.pid
    second = Child(home, f"resume={info.id}")
    assert "still being worked on" in second.finish() and second.returncode == 2
    gate.unlink()
    first.finish()
    assert first.returncode == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    mount = tmp_path / "small"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("this host mounts no small file system, or not as this user")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def test_full_disk_is_one_clear_error_and_nothing_is_lost(small_disk: Path) -> None:
    home = small_disk / "home"
    ballast = small_disk / "ballast"
    child = Child(home, "train.file_bytes=500000")
    assert child.finish() and child.returncode == 0
    before = contents(home)
    ballast.write_bytes(b"x" * 300_000)
    child = Child(home, "train.file_bytes=600000", "train.steps=8")
    output = child.finish()
    assert child.returncode == 1 and "error[E610]: writing failed: the disk is full" in output, output
    assert "run the same command again" in output and "Traceback" not in output
    assert contents(home) == before
    ballast.unlink()
    child = Child(home, "train.file_bytes=100000", "train.steps=8")
    output = child.finish()
    assert child.returncode == 0, output
    assert before.items() <= contents(home).items()
