"""The skypilot executor: the task it compiles to, held to SkyPilot's own types."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.errors import RequestError, RetryableError, UnsupportedError
from nemotron_steps.runs import launch as launching
from nemotron_steps.runs.executors.base import JobState, Launch
from nemotron_steps.runs.executors.skypilot import STATES, SkyPilotExecutor, SkyPilotProfile, task_request
from nemotron_steps.runs.run_folder import get_run
from tests.runs.executors.jobs import submit
from tests.runs.executors.sdks import asked, needs_sdks


def profile_of(mounted: Path, **keys: Any) -> SkyPilotProfile:
    mounts = {str(mounted): {"name": "runs", "mode": "MOUNT"}}
    return SkyPilotProfile.model_validate({"executor": "skypilot", "file_mounts": mounts, **keys})


def a_request(tmp_path: Path, **keys: Any) -> dict[str, Any]:
    words = ("--resume", "r1", "--home", str(tmp_path / "home"))
    profile = profile_of(tmp_path, **keys)
    return task_request(Launch("r1", tmp_path / "home/runs/r1", words, profile, tmp_path, {"STEPS_JOB": "r1"}))


WHOLE: dict[str, Any] = {
    "cloud": "aws",
    "accelerators": "H100",
    "gpus_per_node": 8,
    "nodes": 2,
    "container_image": "nemotron-steps:cuda",
    "env_vars": {"HF_TOKEN": "hf_qwertyuiop", "MODE": "x"},
    "setup_lines": ["ulimit -n 65536"],
}


def test_a_profile_becomes_a_task(tmp_path: Path) -> None:
    request = a_request(tmp_path, **WHOLE)
    assert request["resources"] == {
        "use_spot": False,
        "infra": "aws",
        "accelerators": "H100:8",
        "image_id": "docker:nemotron-steps:cuda",
    }
    assert (request["num_nodes"], request["setup"]) == (2, "ulimit -n 65536")
    assert request["envs"] == {"MODE": "x", "STEPS_JOB": "r1"} and request["secrets"] == {"HF_TOKEN": "hf_qwertyuiop"}
    assert f"exec steps run --resume r1 --home {tmp_path}/home" in request["run"] and "ray start" in request["run"]
    assert subprocess.run(["bash", "-n"], input=request["run"], text=True).returncode == 0
    few = a_request(tmp_path, accelerators="L4", use_spot=True)
    assert few["resources"] == {"use_spot": True, "accelerators": "L4:1"} and few["setup"] is None
    single = a_request(tmp_path)["run"]
    assert "ray" not in single and single.startswith(f"[ ! -d {tmp_path} ] || cd {tmp_path}\n")


@needs_sdks
def test_skypilot_takes_the_task(tmp_path: Path) -> None:
    answer = asked(
        "import sky\n"
        "task = sky.Task.from_yaml_config(request)\n"
        "answer = {'nodes': task.num_nodes, 'run': task.run, 'states': [s.value for s in sky.JobStatus],\n"
        "          'accelerators': next(iter(task.resources)).accelerators}",
        a_request(tmp_path, **WHOLE),
    )
    assert answer["nodes"] == 2 and answer["run"].splitlines()[1].startswith("head=")
    assert answer["accelerators"] == {"H100": 8}
    assert set(STATES) == set(answer["states"])


def test_a_home_that_the_machines_would_not_see_is_refused(store: ArtifactStore) -> None:
    with pytest.raises(RequestError, match="would not see the home") as caught:
        submit(store, profile_of(Path("/elsewhere")))
    assert "file_mounts" in caught.value.hints[0] and get_run(store, "latest").status == "failed"


def test_without_skypilot_it_says_what_to_install(
    store: ArtifactStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sky", None)
    with pytest.raises(UnsupportedError, match="needs SkyPilot") as caught:
        submit(store, profile_of(tmp_path))
    assert "nemotron-steps[skypilot]" in caught.value.hints[0]


class Unavailable(Exception):
    pass


class FetchingError(Exception):
    pass


class StoppingError(Exception):
    """As SkyPilot's ClusterNotUpError, which is no RuntimeError."""


@pytest.fixture
def sky(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A stand-in with the calls of SkyPilot's SDK that are made; `state` is what its one job is in."""
    told = SimpleNamespace(state="RUNNING", asked=[], error=None)

    def launch(task: Any, cluster_name: str, down: bool) -> Any:
        if told.error is not None:
            raise told.error
        told.asked.append(("launch", cluster_name, down))
        return (1, None)

    def job_status(name: str, numbers: list[int]) -> Any:
        if told.error is not None:
            raise told.error
        if told.state is None:
            return {numbers[0]: None}
        return {numbers[0]: SimpleNamespace(value=told.state)}

    module, exceptions = ModuleType("sky"), ModuleType("sky.exceptions")
    vars(module).update(
        Task=SimpleNamespace(from_yaml_config=dict),
        launch=launch,
        get=lambda request: request,
        job_status=job_status,
        cancel=lambda name, job_ids: told.asked.append(("cancel", name, job_ids)),
        exceptions=exceptions,
    )
    vars(exceptions).update(
        ResourcesUnavailableError=Unavailable,
        ApiServerConnectionError=Unavailable,
        ClusterStatusFetchingError=FetchingError,
        ClusterDoesNotExist=LookupError,
        ClusterNotUpError=StoppingError,
        NoCloudAccessError=PermissionError,
    )
    monkeypatch.setitem(sys.modules, "sky", module)
    monkeypatch.setitem(sys.modules, "sky.exceptions", exceptions)
    return told


def test_a_job_is_started_asked_about_and_cancelled(store: ArtifactStore, tmp_path: Path, sky: SimpleNamespace) -> None:
    info = submit(store, profile_of(tmp_path))
    name, number = info.job.split("/")
    assert sky.asked == [("launch", name, True)] and number == "1"
    assert SkyPilotExecutor().status(info.job).state is JobState.RUNNING
    launching.cancel(store, info)
    assert sky.asked[-1] == ("cancel", name, [1])
    for state, ours in (("SUCCEEDED", JobState.DONE), ("FAILED", JobState.FAILED), ("FAILED_DRIVER", JobState.LOST)):
        sky.state = state
        assert SkyPilotExecutor().status(info.job).state is ours
    sky.error = Unavailable("no H100 anywhere")
    with pytest.raises(RetryableError, match="no machine") as caught:
        submit(store, profile_of(tmp_path))
    assert caught.value.found == "no H100 anywhere"


def test_a_job_is_lost_with_its_machines_and_not_where_nobody_may_ask(sky: SimpleNamespace) -> None:
    for sky.error in (StoppingError("its machines are being stopped"), LookupError("no such cluster")):
        assert SkyPilotExecutor().status("steps-1/1").state is JobState.LOST
    sky.error = RuntimeError("authentication is required")
    with pytest.raises(RequestError, match="refused"):
        SkyPilotExecutor().status("steps-1/1")
    sky.error = FetchingError("the cloud cannot be asked")
    with pytest.raises(RetryableError, match="does not answer"):
        SkyPilotExecutor().status("steps-1/1")


def test_one_of_several_mounts_holds_the_home(tmp_path: Path) -> None:
    mounts = {str(path): {"name": "runs"} for path in ("/data", tmp_path)}
    assert list(a_request(tmp_path, file_mounts=mounts)["file_mounts"]) == ["/data", str(tmp_path)]


def test_a_job_is_over_in_the_states_in_which_nothing_more_happens() -> None:
    by_state: dict[JobState, set[str]] = {}
    for name, state in STATES.items():
        by_state.setdefault(state, set()).add(name)
    assert by_state == {
        JobState.PENDING: {"INIT", "PENDING", "SETTING_UP"},
        JobState.RUNNING: {"RUNNING"},
        JobState.DONE: {"SUCCEEDED"},
        JobState.FAILED: {"FAILED", "FAILED_SETUP"},
        JobState.LOST: {"FAILED_DRIVER"},
        JobState.CANCELLED: {"CANCELLED"},
    }


def test_a_job_that_is_not_known_or_in_no_known_state_is_lost_and_not_stopped(sky: SimpleNamespace) -> None:
    for sky.state in (None, "FROZEN"):
        assert SkyPilotExecutor().status("steps-1/1").state is JobState.LOST
        SkyPilotExecutor().cancel("steps-1/1")
    assert sky.asked == []


@pytest.mark.parametrize("job", ["my-cluster/1", "steps-1/x", "steps-1", "1"])
def test_a_jobs_name_that_submission_would_not_give_is_refused(job: str) -> None:
    with pytest.raises(RequestError, match="no job of SkyPilot's"):
        SkyPilotExecutor().status(job)
