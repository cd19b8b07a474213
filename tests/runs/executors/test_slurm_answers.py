"""What Slurm's programs answer, and what is made of it: programs that say what a test tells them stand in."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.errors import RetryableError, UnsupportedError
from nemotron_steps.runs.executors.base import JobState
from nemotron_steps.runs.executors.slurm import Commands, SlurmExecutor, SlurmProfile, _state
from tests.runs.executors.jobs import submit

SLURM = SlurmProfile(executor="slurm")


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Put a program on PATH: name → what its shell does. Returns the file with what the programs were asked."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def make(**programs: str) -> Path:
        for name, does in programs.items():
            (folder / name).write_text(f'#!/bin/bash\necho "{name} $*" >> {tmp_path}/asked\n{does}\n')
            (folder / name).chmod(0o755)
        (tmp_path / "asked").write_text("")
        return tmp_path / "asked"

    return make


@pytest.mark.parametrize(
    ("said", "state"),
    [
        *((word, JobState.PENDING) for word in ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED")),
        *((word, JobState.RUNNING) for word in ("RUNNING", "COMPLETING", "STAGE_OUT", "SIGNALING", "STOPPED")),
        *((word, JobState.LOST) for word in ("NODE_FAIL", "BOOT_FAIL", "PREEMPTED", "REVOKED", "OF_TOMORROW", "")),
        *((word, JobState.TIMED_OUT) for word in ("TIMEOUT", "DEADLINE")),
        *((word, JobState.CANCELLED) for word in ("CANCELLED", "CANCELLED by 1000", "CANCELLED+")),
        *((word, JobState.DONE) for word in ("COMPLETED", "COMPLETED+", " COMPLETED ")),
        ("FAILED", JobState.FAILED),
        ("OUT_OF_MEMORY", JobState.OUT_OF_MEMORY),
    ],
)
def test_states_of_a_job(said: str, state: JobState) -> None:
    assert _state(said) is state


@pytest.mark.parametrize(
    ("sacct", "state", "detail"),
    [
        ("echo 'FAILED|1:0'; echo 'COMPLETED|0:0'", JobState.FAILED, "exit code 1:0"),
        ("echo 'CANCELLED by 0|0:15'", JobState.CANCELLED, "exit code 0:15"),
        ("true", JobState.LOST, "the controller no longer knows the job"),
        ("echo 'Slurm accounting storage is disabled' >&2; exit 1", JobState.LOST, "the controller no longer knows"),
    ],
)
def test_a_job_that_the_controller_forgot_is_looked_up_in_the_accounting(
    program: Callable[..., Path], sacct: str, state: JobState, detail: str
) -> None:
    asked = program(scontrol="echo 'Invalid job id specified' >&2; exit 1", sacct=sacct)
    found = SlurmExecutor().status("7")
    assert found.state is state and found.detail.startswith(detail)
    assert asked.read_text().splitlines()[1].endswith("-j 7")


def test_a_controller_that_cannot_be_reached_says_nothing_of_its_jobs(
    program: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for said in ("Unable to contact slurm controller", "Connection refused", "connect: Connection timed out"):
        program(scontrol=f"echo '{said}' >&2; exit 1", sacct="exit 9")
        with pytest.raises(RetryableError, match="cannot be reached"):
            SlurmExecutor().status("7")
    program(sacct="echo 'COMPLETED|0:0'")
    folder = os.environ["PATH"].partition(":")[0]
    (Path(folder) / "scontrol").unlink()
    monkeypatch.setenv("PATH", folder)
    with pytest.raises(UnsupportedError, match="needs scontrol"):
        SlurmExecutor().status("7")


@pytest.mark.parametrize(
    ("state", "asked"),
    [("PENDING", ["scancel 7"]), ("RUNNING", ["scancel --signal=TERM --batch 7"]), ("COMPLETED", []), ("TIMEOUT", [])],
)
def test_a_queued_job_is_taken_out_and_a_running_one_asked_to_stop(
    program: Callable[..., Path], state: str, asked: list[str]
) -> None:
    heard = program(scontrol=f"echo 'JobId=7 JobState={state} Reason=None ExitCode=0:0'", scancel="true")
    SlurmExecutor().cancel("7")
    assert [line for line in heard.read_text().splitlines() if line.startswith("scancel")] == asked


@pytest.mark.parametrize(
    ("said", "job"), [("7", "7"), ("7;cluster", "7"), ("a banner of the site\\n17;east", "17"), ("  8  ", "8")]
)
def test_the_number_of_a_job_is_the_last_thing_that_sbatch_says(
    store: ArtifactStore, program: Callable[..., Path], said: str, job: str
) -> None:
    program(sbatch=f"printf '{said}\\n'")
    assert submit(store, SLURM).job == job


def test_through_ssh_variables_of_any_kind_arrive_and_a_command_that_is_not_there_is_named(
    program: Callable[..., Path], tmp_path: Path
) -> None:
    asked = program(ssh='exec sh -c "${@: -1}"', bash="exec /bin/bash -s")
    far = Commands("login", folder=str(tmp_path / "far"))
    value = "two words, 'quoted' $HOME\nand a line"
    assert far.call(["printenv", "MODE"], {"MODE": value, "OTHER": "x"}) == f"{value}\n"
    assert asked.read_text().splitlines()[0] == "ssh -o BatchMode=yes -- login bash -l -s", "no key, no user, no value"
    with pytest.raises(UnsupportedError, match="there is no nothing-like-it on login"):
        far.call(["nothing-like-it"])
