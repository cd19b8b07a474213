"""Slurm's commands through ssh: names of jobs, a machine that cannot be reached, full disks, files that change."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.errors import RequestError, RetryableError, StorageError
from nemotron_steps.runs.executors.slurm import Commands, SlurmExecutor, SlurmProfile
from nemotron_steps.runs.run_folder import get_run
from tests.runs.executors.jobs import submit


@pytest.mark.parametrize(
    "job",
    [
        "ssh://-oProxyCommand=x/7?folder=/a",
        "ssh://me@host/7?folder=/a&identity=id",
        "ssh://host/x?folder=/a",
        "ssh://host/7?folder=a",
    ],
)
def test_a_jobs_name_that_submission_would_not_give_is_refused(job: str) -> None:
    with pytest.raises(RequestError, match="not a Slurm job"):
        SlurmExecutor().status(job)


def test_a_machine_that_ssh_does_not_reach_is_retryable(
    store: ArtifactStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "ssh"
    fake.write_text("#!/bin/sh\necho 'ssh: Could not resolve hostname nowhere' >&2\nexit 255\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(RetryableError, match="cannot be reached by ssh") as caught:
        submit(store, SlurmProfile(executor="slurm", tunnel="ssh", host="nowhere", remote_job_dir="/x"))
    assert caught.value.hints == ("ssh nowhere true",) and "Could not resolve" in str(caught.value.found)


@pytest.mark.parametrize(
    "said",
    [
        "tar: r1/plan.json: Cannot open: No space left on device",
    ],
)
def test_a_full_disk_where_jobs_work_is_no_refusal(
    store: ArtifactStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    fake = tmp_path / "ssh"
    last = "tar: Exiting with failure status due to previous errors"
    fake.write_text(f"#!/bin/sh\ncat > /dev/null\necho '{said}' >&2\necho '{last}' >&2\nexit 2\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(StorageError, match="the disk is full") as caught:
        submit(store, SlurmProfile(executor="slurm", tunnel="ssh", host="login", remote_job_dir="/x"))
    assert (caught.value.where, caught.value.found) == ("tar on login", said)
    assert caught.value.hints[0] == "ssh login df -h"
    assert get_run(store, "latest").status == "failed"


@pytest.fixture
def fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Fetch a run's folder through an `ssh` that works on this machine, with a `tar` that ends as it is told; the
    folder here, whose log was shorter before."""

    def fetch(after_tar: str) -> Path:
        programs = tmp_path / "bin"
        programs.mkdir(exist_ok=True)
        tar = shutil.which("tar")
        for name, line in (("ssh", 'exec sh -c "${@: -1}"'), ("tar", f'{tar} "$@" || exit; {after_tar}')):
            (programs / name).write_text(f"#!/bin/bash\n{line}\n")
            (programs / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
        there, here = tmp_path / "there" / ".steps" / "runs" / "r1", tmp_path / "here" / "r1"
        for folder, log in ((there, "one\ntwo\n"), (here, "one\n")):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "log.txt").write_text(log)
        Commands("login", folder=str(tmp_path / "there")).fetch(here)
        return here

    return fetch


def test_a_log_that_grows_while_it_is_fetched_is_no_refusal(fetched: Callable[[str], Path]) -> None:
    here = fetched("echo 'tar: ./log.txt: file changed as we read it' >&2; exit 1")
    assert (here / "log.txt").read_text() == "one\ntwo\n"
    assert [path.name for path in here.iterdir()] == ["log.txt"]


def test_locks_halves_of_files_and_the_jobs_name_are_each_machines_own(
    fetched: Callable[[str], Path], tmp_path: Path
) -> None:
    there = tmp_path / "there/.steps/runs/r1"
    (there / "deeper").mkdir(parents=True)
    for name in ("lock", "submit.lock", ".run.json.tmp", "job.json", "slurm-1.txt", "deeper/log.txt"):
        (there / name).write_text("of the other machine")
    here = tmp_path / "here/r1"
    here.mkdir(parents=True)
    (here / "job.json").write_text("of this one")
    fetched("exit 0")
    assert sorted(path.name for path in here.iterdir()) == ["job.json", "log.txt", "slurm-1.txt"]
    assert (here / "job.json").read_text() == "of this one"
