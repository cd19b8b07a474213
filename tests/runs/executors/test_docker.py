"""The docker executor: the command it gives the engine, and how the engine's answers are read."""

import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.errors import RequestError, RetryableError, StorageError
from nemotron_steps.runs import launch as launching
from nemotron_steps.runs.executors.base import JobState, Launch
from nemotron_steps.runs.executors.docker import DockerExecutor, DockerProfile, run_command
from nemotron_steps.runs.run_folder import get_run
from tests.runs.executors.jobs import submit


def profile_of(**keys: Any) -> DockerProfile:
    return DockerProfile.model_validate({"executor": "docker", "container_image": "nemotron-steps:cuda", **keys})


def a_launch(tmp_path: Path, **keys: Any) -> Launch:
    words = ("--resume", "r1", "--home", str(tmp_path / "home"))
    variables = {"STEPS_JOB": "r1", "NEMOTRON_ENV_FILE": "/etc/steps/env.toml"}
    return Launch("r1", tmp_path / "home/runs/r1", words, profile_of(**keys), tmp_path / "work", variables)


def values_of(command: list[str], flag: str) -> list[str]:
    return [value for word, value in pairwise(command) if word == flag]


def test_a_container_has_the_home_the_working_folder_gpus_and_no_values_in_its_command(tmp_path: Path) -> None:
    keys = {"mounts": ["/data:/data"], "env_vars": {"HF_TOKEN": "hf_qwertyuiop"}, "gpus_per_node": 8}
    command = run_command(a_launch(tmp_path, **keys, setup_lines=["ulimit -n 65536"]), "steps-r1-0")
    home, work = tmp_path / "home", tmp_path / "work"
    assert command[:3] == ["docker", "run", "--detach"]
    assert values_of(command, "--volume") == [
        "/data:/data",
        f"{home}:{home}",
        f"{work}:{work}",
        "/etc/steps/env.toml:/etc/steps/env.toml:ro",
    ]
    assert values_of(command, "--env") == ["HF_TOKEN", "STEPS_JOB", "NEMOTRON_ENV_FILE"]
    assert values_of(command, "--gpus") == ["8"] and values_of(command, "--workdir") == [str(work)]
    assert command[-4:-1] == ["nemotron-steps:cuda", "bash", "-c"]
    first, check, run = command[-1].splitlines()
    assert (first, run) == ("ulimit -n 65536", f"exec steps run --resume r1 --home {home}")
    told = subprocess.run(["bash", "-c", check], env={"PATH": "/usr/bin"}, capture_output=True, text=True)
    assert told.returncode == 2 and "image nemotron-steps:cuda has no `steps`" in told.stderr
    assert "BASE=nemotron-steps:cuda --build-arg PYTHON=python3.12 -t IMAGE" in told.stderr
    assert "qwertyuiop" not in " ".join(command)
    podman = run_command(a_launch(tmp_path, engine="podman", gpus_per_node=1), "steps-r1-0")
    assert podman[0] == "podman" and values_of(podman, "--device") == ["nvidia.com/gpu=all"]


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `docker` that answers with the content of a file, and exits with 1 if that begins with `error`; what it was
    asked is in `asked` beside it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    answer = folder / "answer"
    program = folder / "docker"
    program.write_text(
        f'#!/bin/sh\necho "$1 HF_TOKEN=$HF_TOKEN" >> {folder}/asked\ncat {answer}\n! grep -q ^error {answer}\n'
    )
    program.chmod(0o755)
    answer.write_text("running 0 false")
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return answer


@pytest.mark.parametrize(
    ("said", "state"),
    [
        ("created 0 false", JobState.PENDING),
        ("paused 0 false", JobState.RUNNING),
        ("exited 0 false", JobState.DONE),
        ("dead 1 false", JobState.FAILED),
        ("exited 137 true", JobState.OUT_OF_MEMORY),
        ("exited 137 false", JobState.LOST),
        ("error: no such container", JobState.LOST),
    ],
)
def test_states_of_a_container(engine: Path, said: str, state: JobState) -> None:
    engine.write_text(said)
    assert DockerExecutor().status("docker/steps-r1-0").state is state


def test_a_container_is_started_with_its_variables_and_stopped(store: ArtifactStore, engine: Path) -> None:
    info = submit(store, profile_of(env_vars={"HF_TOKEN": "hf_qwertyuiop"}))
    assert info.job.startswith(f"docker/steps-{info.id}-")
    launching.cancel(store, info)
    asked = (engine.parent / "asked").read_text().splitlines()
    assert asked[0] == "run HF_TOKEN=hf_qwertyuiop"
    assert [line.split()[0] for line in asked].count("kill") == 1


@pytest.mark.parametrize(
    ("said", "error", "message"),
    [
        ("error: pull access denied for nowhere", RequestError, "pull access denied"),
        ("error: Cannot connect to the Docker daemon at unix:///x", RetryableError, "no docker daemon answers"),
        ("error: write /var/lib/docker/x: no space left on device", StorageError, "docker keeps images on is full"),
    ],
)
def test_an_image_or_a_daemon_that_is_not_there_fails_the_run_with_one_error(
    store: ArtifactStore, engine: Path, said: str, error: type[Exception], message: str
) -> None:
    engine.write_text(f"{said}\n\nRun 'docker run --help' for more information\n")
    with pytest.raises(error, match=message) as caught:
        submit(store, profile_of())
    assert "--help" not in str(caught.value)
    assert get_run(store, "latest").status == "failed"


def test_a_job_is_not_lost_where_the_engine_refuses_to_answer(engine: Path) -> None:
    engine.write_text("error: permission denied while trying to connect to the Docker daemon socket")
    with pytest.raises(RequestError, match="permission denied"):
        DockerExecutor().status("docker/steps-r1-0")
    engine.write_text("error: inspecting object: no such object: steps-r1-0")
    assert DockerExecutor().status("docker/steps-r1-0").state is JobState.LOST


@pytest.mark.parametrize("job", ["rm/-rf", "rm/steps-r1-0", "docker/postgres", "docker"])
def test_a_jobs_name_that_is_no_container_of_a_run_is_refused(job: str) -> None:
    with pytest.raises(RequestError, match="not a container of a run"):
        DockerExecutor().status(job)
