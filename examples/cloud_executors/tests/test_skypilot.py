"""The skypilot executor: the task it compiles to, held to SkyPilot's own types, and what its SDK is asked."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from cloud_executors.skypilot import STATES, SkyPilotExecutor, SkyPilotProfile, task_request

from nemotron_steps.config.profiles import Profile
from nemotron_steps.errors import RequestError, RetryableError, UnsupportedError
from nemotron_steps.runs.executors.base import JobState, Launch
from nemotron_steps.testing import executor_conformance

LaunchOf = Callable[[Profile], Launch]
MOUNTS = {"/data": "s3://data", "/": {"name": "runs", "mode": "MOUNT"}}
WHOLE: dict[str, Any] = {
    "cloud": "aws",
    "accelerators": "H100",
    "gpus_per_node": 8,
    "nodes": 2,
    "container_image": "nemotron-steps:cuda",
    "env_vars": {"HF_TOKEN": "hf_qwertyuiop", "MODE": "x"},
    "setup_lines": ["ulimit -n 65536"],
}

TestSkyPilot = executor_conformance("skypilot", profile={"cloud": "aws", "file_mounts": MOUNTS}, jobs=False)


def profile(**keys: Any) -> SkyPilotProfile:
    return SkyPilotProfile.model_validate({"executor": "skypilot", "file_mounts": MOUNTS, **keys})


def test_a_profile_becomes_a_task(launch_of: LaunchOf, tmp_path: Path) -> None:
    request = task_request(launch_of(profile(**WHOLE)))
    run = request.pop("run")
    assert request == {
        "name": "steps-r1",
        "num_nodes": 2,
        "resources": {
            "use_spot": False,
            "infra": "aws",
            "accelerators": "H100:8",
            "image_id": "docker:nemotron-steps:cuda",
        },
        "file_mounts": MOUNTS,
        "envs": {"MODE": "x", "STEPS_JOB": "r1"},
        "secrets": {"HF_TOKEN": "hf_qwertyuiop"},
        "setup": "ulimit -n 65536",
    }
    assert f"exec steps run --resume r1 --home {tmp_path}/home" in run and "ray start" in run
    assert subprocess.run(["bash", "-n"], input=run, text=True).returncode == 0
    few = task_request(launch_of(profile(accelerators="L4", use_spot=True)))
    assert few["resources"] == {"use_spot": True, "accelerators": "L4:1"} and few["setup"] is None
    assert "ray" not in few["run"]


def test_skypilot_takes_the_task(launch_of: LaunchOf, sdk: Callable[..., Any]) -> None:
    answer = sdk(
        "import sky\n"
        "task = sky.Task.from_yaml_config(request)\n"
        "answer = {'nodes': task.num_nodes, 'run': task.run, 'states': [s.value for s in sky.JobStatus],\n"
        "          'accelerators': next(iter(task.resources)).accelerators}",
        "sky",
        # A bucket is asked about where it is named.
        task_request(launch_of(profile(**WHOLE, file_mounts={"/": {"name": "runs", "mode": "MOUNT"}}))),
    )
    assert answer["nodes"] == 2 and "\nhead=" in answer["run"]
    assert answer["accelerators"] == {"H100": 8}
    assert set(STATES) == set(answer["states"])


def test_a_home_that_the_machines_would_not_see_is_refused(launch_of: LaunchOf) -> None:
    with pytest.raises(RequestError, match="would not see the home") as caught:
        SkyPilotExecutor().submit(launch_of(profile(file_mounts={"/elsewhere": "s3://data"})))
    assert "file_mounts" in caught.value.hints[0]


def test_without_skypilot_it_says_what_to_install(launch_of: LaunchOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sky", None)
    with pytest.raises(UnsupportedError, match="needs SkyPilot") as caught:
        SkyPilotExecutor().submit(launch_of(profile()))
    assert caught.value.hints[0] == "pip install 'skypilot>=0.10'"


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
        return {number: told.state and SimpleNamespace(value=told.state) for number in numbers}

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


def test_a_job_is_started_and_cancelled_while_it_works(launch_of: LaunchOf, sky: SimpleNamespace) -> None:
    job = SkyPilotExecutor().submit(launch_of(profile()))
    name, number = job.split("/")
    assert sky.asked == [("launch", name, True)] and number == "1"
    SkyPilotExecutor().cancel(job)
    assert sky.asked[1:] == [("cancel", name, [1])]
    for sky.state in ("SUCCEEDED", None, "FROZEN"):
        SkyPilotExecutor().cancel(job)
    assert len(sky.asked) == 2
    sky.error = Unavailable("no H100 anywhere")
    with pytest.raises(RetryableError, match="no machine") as caught:
        SkyPilotExecutor().submit(launch_of(profile()))
    assert caught.value.found == "no H100 anywhere"


@pytest.mark.parametrize(
    ("job", "states", "error", "told"),
    [
        ("steps-1/1", "INIT PENDING SETTING_UP", None, JobState.PENDING),
        ("steps-1/1", "RUNNING", None, JobState.RUNNING),
        ("steps-1/1", "SUCCEEDED", None, JobState.DONE),
        ("steps-1/1", "FAILED FAILED_SETUP", None, JobState.FAILED),
        ("steps-1/1", "CANCELLED", None, JobState.CANCELLED),
        ("steps-1/1", "FAILED_DRIVER FROZEN", None, JobState.LOST),
        ("steps-1/1", "", None, JobState.LOST),
        ("steps-1/1", "RUNNING", StoppingError("its machines are being stopped"), JobState.LOST),
        ("steps-1/1", "RUNNING", LookupError("no such cluster"), JobState.LOST),
        ("steps-1/1", "RUNNING", RuntimeError("authentication is required"), "SkyPilot refused"),
        ("steps-1/1", "RUNNING", FetchingError("the cloud cannot be asked"), "does not answer"),
        # Of nobody's, or of a cluster that the user started.
        *(
            (job, "RUNNING", None, JobState.LOST)
            for job in ("my-cluster/1", "steps-mine/1", "steps-1/x", "steps-1", "")
        ),
    ],
)
def test_a_job_is_lost_with_its_machines_and_not_where_nobody_may_ask(
    sky: SimpleNamespace, job: str, states: str, error: Exception | None, told: JobState | str
) -> None:
    sky.error = error
    for sky.state in states.split() or [None]:
        if isinstance(told, JobState):
            assert SkyPilotExecutor().status(job).state is told
        else:
            with pytest.raises((RequestError, RetryableError), match=told):
                SkyPilotExecutor().status(job)
