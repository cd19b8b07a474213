"""What every executor is, the detached process, executors of installed packages, and the keys of profiles."""

import os
import subprocess
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import ClassVar

import pytest

from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.config.profiles import Profile, load_environment
from nemotron_steps.errors import (
    ConfigError,
    InterruptedRunError,
    StepFailedError,
    UnsupportedError,
    WorkerLostError,
)
from nemotron_steps.runs import launch as launching
from nemotron_steps.runs.executors import base
from nemotron_steps.runs.executors.base import JobState, Launch, find_executor
from nemotron_steps.runs.executors.detached import DetachedExecutor
from nemotron_steps.runs.run_folder import RunFolder, get_run, new_run_id, read_events
from tests.runs.executors.jobs import ROOT, submit, wait_until


def test_detached_run_is_cancelled_and_goes_on(store: ArtifactStore, toy: Path) -> None:
    toy.touch()
    run_id = submit(store, Profile()).id
    wait_until(lambda: any(m["index"] == 4 for m in read_events(store, run_id, "metrics")))
    assert launching.job_status(store, get_run(store, run_id)) == base.JobStatus(
        JobState.RUNNING, f"process {get_run(store, run_id).pid}"
    )
    launching.cancel(store, get_run(store, run_id))
    with pytest.raises(InterruptedRunError, match="SIGTERM"):
        launching.follow(store, run_id, lambda text: None)
    toy.unlink()
    submit(store, Profile(), run_id=run_id)
    assert launching.follow(store, run_id, lambda text: None).attempts == 2
    assert [e["fields"]["step"] for e in read_events(store, run_id) if e.get("name") == "loaded"] == [0, 4]


def test_run_whose_process_never_began_is_lost(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch, toy: Path
) -> None:
    monkeypatch.setattr(Launch, "command", lambda self, **_: ["false"])
    info = submit(store, Profile())
    with pytest.raises(WorkerLostError):
        launching.follow(store, info.id, lambda text: None)


def test_reused_process_id_is_not_the_job() -> None:
    assert DetachedExecutor().status(f"{os.getpid()}@1").state is JobState.LOST
    DetachedExecutor().cancel(f"{os.getpid()}@1")


def test_secrets_of_a_submitted_request_are_not_written(store: ArtifactStore) -> None:
    run_id = new_run_id("toy")
    RunFolder(store, run_id).create("toy", {"overrides": ["a.api_key=sk-12345678", "b=sk-12345678"]})
    assert get_run(store, run_id).request == {"overrides": ["a.api_key=***", "b=***"]}


class FarProfile(Profile):
    queue: str = "short"


class FarExecutor:
    """A plugin's executor with keys of its own; it keeps what it was given."""

    profile_model = FarProfile
    launches: ClassVar[list[Launch]] = []

    def submit(self, launch: Launch) -> str:
        self.launches.append(launch)
        return "job-1"

    def status(self, job: str) -> base.JobStatus:
        return base.JobStatus(JobState.OUT_OF_MEMORY, "exit code 0:125")

    def cancel(self, job: str) -> None:
        return None


class SilentExecutor(FarExecutor):
    """Its jobs stand nowhere."""

    def status(self, job: str) -> base.JobStatus:
        return None  # type: ignore[return-value]


class WithoutAModel(FarExecutor):
    profile_model = "FarProfile"  # type: ignore[assignment]


class NotAnExecutor:
    pass


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Executors announced by installed packages."""
    names = {
        "far": "FarExecutor",
        "broken": "NotAnExecutor",
        "silent": "SilentExecutor",
        "text": "WithoutAModel",
    }
    points = [EntryPoint(name, f"{__name__}:{attribute}", base.ENTRY_POINT_GROUP) for name, attribute in names.items()]
    points += points[:1]  # of a package that is on the path twice
    points += [EntryPoint("twice", f"{__name__}:{name}", base.ENTRY_POINT_GROUP) for name in ("FarExecutor", "Other")]
    monkeypatch.setattr(base, "entry_points", lambda group: points if group == "nemotron_steps.executors" else [])
    FarExecutor.launches.clear()


def test_third_party_executor_is_found_by_its_entry_point(store: ArtifactStore, plugins: None) -> None:
    info = submit(store, FarProfile(executor="far"))
    assert (info.executor, info.job) == ("far", "job-1")
    with pytest.raises(StepFailedError, match="out of memory"):
        launching.follow(store, info.id, lambda text: None)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broken", "lacks submit, status, cancel"),
        ("twice", "several installed packages"),
        ("text", "profile_model that is not a Profile"),
    ],
)
def test_a_plugin_that_is_no_executor_is_named(plugins: None, name: str, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        find_executor(name)


def test_an_executor_that_does_not_say_where_a_job_stands_is_named(store: ArtifactStore, plugins: None) -> None:
    info = submit(store, FarProfile(executor="silent"))
    with pytest.raises(UnsupportedError, match="executor 'silent' does not say where a job stands"):
        launching.follow(store, info.id, lambda text: None)


@pytest.mark.parametrize("name", ["dgxcloud", "skypilot"])
def test_an_executor_of_the_examples_says_where_it_is(name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"no executor '{name}' is installed") as caught:
        find_executor(name)
    folder = caught.value.hints[0].split()[2]
    declared = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]["entry-points"]
    assert name in declared[base.ENTRY_POINT_GROUP]


def write_profile(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    (folder / "env.toml").write_text(text)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "none"))
    monkeypatch.chdir(folder)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ('executor = "slurm"\nnproc_per_node = 8', r"unknown key .nproc_per_node."),
        ("nodes = 2", "'nodes' has a wrong value"),
    ],
)
def test_keys_that_would_do_nothing_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: str, message: str
) -> None:
    write_profile(tmp_path, monkeypatch, f"[a]\n{keys}\n")
    with pytest.raises(ConfigError, match=message) as caught:
        load_environment().profile("a", base.profile_model)
    assert str(caught.value.where).startswith(f"{tmp_path}/env.toml:")


def test_a_launchs_own_variables_come_before_the_profiles_and_secrets_are_named_in_order(tmp_path: Path) -> None:
    keys = {"MODE": "profile", "HF_TOKEN": "hf_qwertyuiop", "A": "1"}
    environment = {"MODE": "launch", "API_KEY": "sk-qwertyuiop", "B": "2"}
    launch = Launch("r1", tmp_path / "home/runs/r1", ("a",), Profile(env_vars=keys), tmp_path, environment)
    assert launch.variables == {**keys, **environment} and launch.secret_variables == ["API_KEY", "HF_TOKEN"]
    assert launch.home == tmp_path / "home"
    assert launch.command(in_container=True) == ["steps", "run", "a"] and launch.command()[-2:] == ["run", "a"]


@pytest.mark.parametrize(
    ("nodes", "rank", "folder", "said"),
    [
        (1, "0", "my work", "steps in my work, none\n"),
        (1, "0", "unseen", "steps in image, none\n"),
        (2, "0", "my work", "ray --head\nsteps in my work, first:26379\n"),
        (2, "1", "unseen", "ray --address=first:26379\n"),
    ],
)
def test_the_first_node_of_a_job_does_the_run_and_the_others_are_rays_until_it_ends(
    tmp_path: Path, nodes: int, rank: str, folder: str, said: str
) -> None:
    """With programs that say how they were called."""
    for made in ("my work", "image", "bin"):
        (tmp_path / made).mkdir()
    programs = {"ray": 'echo "ray $3"', "steps": 'echo "steps in ${PWD##*/}, ${RAY_ADDRESS:-none}"'}
    for name, line in programs.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    launch = Launch("r1", tmp_path / "home/runs/r1", (), Profile(nodes=nodes), tmp_path / folder)
    # A port that answers once, then no more: the first node came up, and ended.
    script = launch.node_script(head="first", rank="$N").replace(
        "(exec 3<>/dev/tcp/$head/26379)", "{ [ ! -e gone ] && touch gone; }"
    )
    environment = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "N": rank}
    command = ["bash", "-c", script.replace("sleep 5", "exit 9")]
    done = subprocess.run(command, env=environment, cwd=tmp_path / "image", capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, said), done.stderr
