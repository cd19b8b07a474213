"""Executors: the detached process and the batch script everywhere, a real Slurm of one node where it is installed."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar

import pytest

import nemotron_steps
from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.config.profiles import OpenProfile, Profile, load_environment
from nemotron_steps.errors import (
    ConfigError,
    DataError,
    InterruptedRunError,
    NonFiniteLossError,
    RequestError,
    StepFailedError,
    UnsupportedError,
    WorkerLostError,
)
from nemotron_steps.runs import launch as launching
from nemotron_steps.runs.executors import base
from nemotron_steps.runs.executors.base import JobState, Launch, find_executor
from nemotron_steps.runs.executors.detached import DetachedExecutor
from nemotron_steps.runs.executors.slurm import SlurmExecutor, SlurmProfile, batch_script, parse_fields
from nemotron_steps.runs.locks import hold
from nemotron_steps.runs.run_folder import RunFolder, RunInfo, get_run, new_run_id, read_events
from tests.runs import runner_toy_steps

ROOT = Path(nemotron_steps.__file__).parents[1]
HERE = Path(__file__).parent


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Jobs run the toy chain instead of the command line; while the returned gate exists they wait at step 4."""
    settings: list[str] = []

    def command(self: Launch, *, in_container: bool = False) -> list[str]:
        words = dict(zip(self.arguments[-4::2], self.arguments[-3::2], strict=True))
        extra = self.arguments[:-4]
        return [
            sys.executable,
            str(HERE / "runner_toy_plan.py"),
            words["--home"],
            f"resume={words['--resume']}",
            *extra,
        ]

    monkeypatch.setattr(Launch, "command", command)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{HERE}")
    gate = tmp_path / "gate"
    monkeypatch.setenv("TOY_GATE", str(gate))
    assert runner_toy_steps and settings == []
    return gate


def submit(store: ArtifactStore, profile: Profile, *arguments: str, run_id: str | None = None) -> RunInfo:
    if run_id is None:
        run_id = new_run_id("toy")
        RunFolder(store, run_id).create("toy", {"targets": ["toy/train"]})
    return launching.submit(store, profile, run_id=run_id, arguments=arguments)


def test_detached_run_outlives_the_call_and_is_followed(store: ArtifactStore, toy: Path) -> None:
    info = submit(store, Profile())
    assert (info.executor, info.status) in {("local", "submitted"), ("local", "running"), ("local", "done")}
    text: list[str] = []
    info = launching.follow(store, info.id, text.append)
    assert info.status == "done" and "step 10:" in "".join(text)
    wait_until(lambda: DetachedExecutor().status(info.job).state is JobState.LOST)


def test_detached_run_is_cancelled_and_goes_on(store: ArtifactStore, toy: Path) -> None:
    toy.touch()
    run_id = submit(store, Profile()).id
    wait_until(lambda: any(m["index"] == 4 for m in read_events(store, run_id, "metrics")))
    assert launching.job_status(get_run(store, run_id)) == base.JobStatus(
        JobState.RUNNING, f"process {get_run(store, run_id).pid}"
    )
    launching.cancel(store, get_run(store, run_id))
    with pytest.raises(InterruptedRunError, match="SIGTERM"):
        launching.follow(store, run_id, lambda text: None)
    toy.unlink()
    submit(store, Profile(), run_id=run_id)
    assert launching.follow(store, run_id, lambda text: None).attempts == 2
    assert [e["fields"]["step"] for e in read_events(store, run_id) if e.get("name") == "loaded"] == [0, 4]


def test_failure_of_a_detached_run_is_raised_as_it_was(store: ArtifactStore, toy: Path) -> None:
    info = submit(store, Profile(), "train.fail=nan")
    with pytest.raises(NonFiniteLossError, match="step 5") as caught:
        launching.follow(store, info.id, lambda text: None)
    assert caught.value.where == "step 5" and "lower the learning rate" in caught.value.hints[-1]


def test_an_error_of_another_packages_class_keeps_its_code() -> None:
    told = {"class": "TheirError", "code": "X901", "what": "theirs", "where": "here", "hints": ["theirs too"]}
    error = launching.error_of(RunInfo("r1", error=told))
    assert error is not None and (error.code, error.what, error.where) == ("X901", "theirs", "here")
    ours = launching.error_of(RunInfo("r1", error={"class": "DataError", "what": "ours"}))
    assert isinstance(ours, DataError) and ours.code == DataError("x").code != "X901"


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


class OpenExecutor(FarExecutor):
    profile_model = OpenProfile


class RefusingExecutor(FarExecutor):
    def submit(self, launch: Launch) -> str:
        raise RequestError("the queue is closed", hints=("try again",))


class QueueExecutor(FarExecutor):
    """A job waits in a queue until it is cancelled."""

    state = JobState.PENDING

    def status(self, job: str) -> base.JobStatus:
        return base.JobStatus(QueueExecutor.state)

    def cancel(self, job: str) -> None:
        QueueExecutor.state = JobState.CANCELLED


class NotAnExecutor:
    pass


class NoModelExecutor(FarExecutor):
    profile_model = "queue"  # type: ignore[assignment]


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Executors announced by installed packages."""
    names = {
        "far": "FarExecutor",
        "open": "OpenExecutor",
        "refusing": "RefusingExecutor",
        "queue": "QueueExecutor",
        "broken": "NotAnExecutor",
        "modelless": "NoModelExecutor",
        "gone": "Missing",
    }
    points = [EntryPoint(name, f"{__name__}:{attribute}", base.ENTRY_POINT_GROUP) for name, attribute in names.items()]
    points += [EntryPoint("twice", f"{__name__}:{name}", base.ENTRY_POINT_GROUP) for name in ("FarExecutor", "Other")]
    monkeypatch.setattr(base, "entry_points", lambda group: points if group == "nemotron_steps.executors" else [])
    FarExecutor.launches.clear()
    QueueExecutor.state = JobState.PENDING


def test_third_party_executor_is_found_by_its_entry_point(store: ArtifactStore, plugins: None) -> None:
    info = submit(store, FarProfile(executor="far"))
    assert (info.executor, info.job) == ("far", "job-1")
    with pytest.raises(StepFailedError, match="out of memory"):
        launching.follow(store, info.id, lambda text: None)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broken", "lacks submit, status, cancel"),
        ("gone", "cannot be loaded"),
        ("modelless", "profile_model that is none"),
        ("twice", "several installed packages"),
    ],
)
def test_a_plugin_that_is_no_executor_is_named(plugins: None, name: str, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        find_executor(name)


def test_an_unknown_executor_says_which_there_are_and_what_would_bring_it(plugins: None) -> None:
    with pytest.raises(UnsupportedError, match="no executor 'skypilot'") as caught:
        find_executor("skypilot")
    assert caught.value.expected == "broken or far or gone or local or modelless or open or queue or refusing or " + (
        "slurm or twice"
    )
    assert "nemotron_steps.executors have 'skypilot'" in caught.value.hints[0]


def write_profile(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    (folder / "env.toml").write_text(text)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "none"))
    monkeypatch.chdir(folder)


def test_profile_keys_of_a_plugin_are_checked_by_its_model(
    plugins: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_profile(
        tmp_path,
        monkeypatch,
        '[a]\nexecutor = "far"\nqueue = "long"\nnodes = 2\n[b]\nextends = "a"\nquue = "x"\npartition = "gpu"\n'
        '[c]\nexecutor = "open"\nanything = [1, 2]\n',
    )
    environment = load_environment()
    profile = environment.profile("a", base.profile_model)
    assert isinstance(profile, FarProfile) and (profile.queue, profile.nodes) == ("long", 2)
    with pytest.raises(ConfigError) as caught:
        environment.profile("b", base.profile_model)
    assert {p.what: p.expected for p in caught.value.problems} == {
        "unknown key 'quue' in [b], whose executor is far": "queue",
        "unknown key 'partition' in [b], whose executor is far": (
            "executor, extends, nodes, gpus_per_node, env_vars, setup_lines, queue"
        ),
    }
    assert environment.profile("c", base.profile_model).model_extra == {"anything": [1, 2]}


def test_an_executor_that_is_not_installed_is_refused_at_the_profiles_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_profile(tmp_path, monkeypatch, '[a]\nnodes = 1\nexecutor = "lepton"\n')
    with pytest.raises(UnsupportedError, match="no executor 'lepton'") as caught:
        load_environment().profile("a", base.profile_model)
    assert caught.value.where == f"{tmp_path}/env.toml:3" and caught.value.expected == "local or slurm"


def test_a_refused_submission_ends_a_new_run(store: ArtifactStore, plugins: None) -> None:
    with pytest.raises(RequestError, match="queue is closed"):
        submit(store, FarProfile(executor="refusing"))
    info = get_run(store, "latest")
    assert (info.status, info.job) == ("failed", "")
    assert info.error is not None and info.error["what"] == "the queue is closed"


def test_a_refused_submission_leaves_an_earlier_run_as_it_was(store: ArtifactStore, plugins: None) -> None:
    folder = RunFolder(store, "r1")
    before = folder.update(folder.create("toy", {"targets": ["a"]}), status="failed", attempts=1, error={"what": "x"})
    with pytest.raises(RequestError, match="queue is closed"):
        launching.submit(
            store, FarProfile(executor="refusing"), run_id="r1", arguments=[], request={"targets": ["other"]}
        )
    after = get_run(store, "r1")
    assert (after.status, after.request, after.error) == ("failed", before.request, {"what": "x"})


def test_a_run_nobody_submits_any_more_does_not_wait_for_ever(store: ArtifactStore) -> None:
    folder = RunFolder(store, "r1")
    folder.create("toy", {})
    assert get_run(store, "r1").status == "killed"
    with hold(folder.submit_lock, {}, lambda holder: None):
        assert get_run(store, "r1").status == "submitted"


def test_a_job_cancelled_in_its_queue_ends_the_run(store: ArtifactStore, plugins: None) -> None:
    info = submit(store, FarProfile(executor="queue"))
    assert info.status == "submitted"
    launching.cancel(store, info)
    assert get_run(store, info.id).status == "interrupted"
    with pytest.raises(InterruptedRunError, match="cancelled before it began"):
        launching.follow(store, info.id, lambda text: None)


def test_a_plugin_is_told_whether_somebody_waits(store: ArtifactStore, plugins: None) -> None:
    RunFolder(store, "r1").create("toy", {})
    launching.submit(store, FarProfile(executor="far"), run_id="r1", arguments=[], attached=True)
    submit(store, FarProfile(executor="far"))
    assert [launch.attached for launch in FarExecutor.launches] == [True, False]


@pytest.mark.parametrize(
    ("keys", "attached", "expected"),
    [
        ({"partition": "all"}, True, "all"),
        ({"partition": "all", "run_partition": "quick"}, True, "quick"),
        ({"partition": "all", "run_partition": "quick"}, False, "all"),
        ({"partition": "all", "batch_partition": "long"}, False, "long"),
        ({"batch_partition": "long"}, True, None),
    ],
)
def test_slurm_partitions_of_attached_and_detached_runs(
    tmp_path: Path, keys: dict[str, str], attached: bool, expected: str | None
) -> None:
    script = batch_script(replace(a_launch(tmp_path, **keys), attached=attached))
    found = re.search(r"^#SBATCH --partition=(.*)$", script, re.MULTILINE)
    assert (found[1] if found else None) == expected


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            'executor = "slurm"\nproject = "p"',
            "unknown key 'project' in .a., whose executor is slurm: it is DGX Cloud's",
        ),
        ('executor = "slurm"\ntunnel = "ssh"', "unknown key 'tunnel' .* no executor here submits through ssh"),
        ('executor = "slurm"\nnproc_per_node = 8', r"unknown key 'nproc_per_node' .* cluster\.\* keys"),
        ('partition = "gpu"', "unknown key 'partition' in .a., whose executor is local"),
        ("nodes = 2", "'nodes' in .a. is wrong"),
        ('executor = "slurm"\nmounts = ["/a:/b"]', "mounts are for a container"),
    ],
)
def test_keys_that_would_do_nothing_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: str, message: str
) -> None:
    write_profile(tmp_path, monkeypatch, f"[a]\n{keys}\n")
    with pytest.raises(ConfigError, match=message):
        load_environment().profile("a", base.profile_model)


def test_force_squash_without_an_image_to_import_is_refused(tmp_path: Path) -> None:
    for keys in ({}, {"container_image": "/images/nemo.sqsh"}):
        with pytest.raises(RequestError, match="--force-squash"):
            batch_script(replace(a_launch(tmp_path, **keys), force_squash=True))
    again = replace(a_launch(tmp_path, container_image="nvcr.io/x"), force_squash=True)
    assert "if true; then" in batch_script(again)


def a_launch(tmp_path: Path, **profile: Any) -> Launch:
    folder = tmp_path / "runs" / "r1"
    arguments = ("--resume", "r1", "--home", str(tmp_path))
    settings = {"executor": "slurm", **profile}
    return Launch("r1", folder, arguments, SlurmProfile(**settings), tmp_path, {"EXTRA_TOKEN": "secret-value-1"})


def test_batch_script_says_what_the_profile_says(tmp_path: Path) -> None:
    script = batch_script(
        a_launch(
            tmp_path,
            account="research",
            partition="gpu",
            nodes=1,
            gpus_per_node=8,
            cpus_per_task=16,
            mem="64G",
            time="03:30",
            exclusive=True,
            env_vars={"HF_TOKEN": "hf-secret-value"},
            setup_lines=["module load cuda", "ulimit -n 65536"],
        )
    )
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", script, re.MULTILINE))
    assert options == {
        "job-name": "steps-r1",
        "output": f"{tmp_path}/runs/r1/slurm-%j.txt",
        "open-mode": "append",
        "chdir": str(tmp_path),
        "nodes": "1",
        "ntasks-per-node": "1",
        "account": "research",
        "partition": "gpu",
        "time": "0-03:30:00",
        "signal": "B:TERM@120",
        "gpus-per-node": "8",
        "cpus-per-task": "16",
        "mem": "64G",
        "no-requeue": "",
        "exclusive": "",
    }
    assert (
        script.index("module load cuda")
        < script.index("ulimit")
        < script.index("nemotron_steps.cli.main run --resume r1")
    )
    assert "secret" not in script
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0


def test_batch_script_of_several_nodes_in_a_container(tmp_path: Path) -> None:
    launch = a_launch(tmp_path, nodes=4, container_image="nvcr.io/nvidia/nemo:25.09", mounts=["/data:/data"])
    script = batch_script(launch)
    assert "ray start --head" in script and 'export RAY_ADDRESS="$address:' in script
    assert "enroot import" in script and "docker://nvcr.io/nvidia/nemo:25.09" in script
    assert f"--container-mounts=/data:/data,{launch.folder}:{launch.folder}" in script
    assert "steps run --resume r1" in script and sys.executable not in script
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    ready = batch_script(a_launch(tmp_path, container_image="/images/nemo.sqsh"))
    assert "enroot" not in ready and "image=/images/nemo.sqsh" in ready


@pytest.mark.parametrize(
    ("limit", "written"),
    [("03:30", "0-03:30:00"), ("00:00:45", "0-00:00:45"), ("30:00", "1-06:00:00"), ("2-05:10:20", "2-05:10:20")],
)
def test_a_time_limit_is_written_as_days_and_hours_below_24(tmp_path: Path, limit: str, written: str) -> None:
    assert f"#SBATCH --time={written}\n" in batch_script(a_launch(tmp_path, time=limit))


@pytest.mark.parametrize(("limit", "warned"), [("00:10", 60), ("1-00:00", 120), ("00:01:00", 6)])
def test_short_jobs_are_warned_later(tmp_path: Path, limit: str, warned: int) -> None:
    assert f"--signal=B:TERM@{warned}\n" in batch_script(a_launch(tmp_path, time=limit))


def test_batch_script_hands_signals_on_and_returns_the_runs_exit_code(tmp_path: Path) -> None:
    launch = a_launch(tmp_path)
    script = batch_script(launch)
    command = script[script.index("\n", script.index("set -u")) :]
    command = re.sub(r"^.*nemotron_steps\.cli\.main.*&$", '"$@" &', command, flags=re.MULTILINE)
    trap = "trap 'sleep 0.2; exit 130' TERM; echo ready; while :; do sleep 0.05; done"
    process = subprocess.Popen(["bash", "-c", command, "bash", "bash", "-c", trap], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.terminate()
    assert process.wait(timeout=20) == 130
    assert subprocess.run(["bash", "-c", command, "bash", "bash", "-c", "exit 3"]).returncode == 3


def test_batch_script_hands_on_a_signal_that_comes_before_the_run_is_known(tmp_path: Path) -> None:
    script = batch_script(a_launch(tmp_path))
    command = script[script.index("\n", script.index("set -u")) :]
    # The shell is signalled by its own child before it has noted the child's number.
    started = "bash -c 'kill -TERM $PPID; sleep 30' &\nsleep 0.5 || true"
    command = re.sub(r"^.*nemotron_steps\.cli\.main.*&$", started, command, flags=re.MULTILINE)
    assert subprocess.run(["bash", "-c", command], timeout=20).returncode == 128 + signal.SIGTERM


def test_multi_line_profile_values_cannot_add_script_lines(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="one line"):
        batch_script(a_launch(tmp_path, account="x\nrm -rf y"))


def test_missing_sbatch_is_unsupported(store: ArtifactStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnsupportedError, match="needs sbatch"):
        submit(store, SlurmProfile(executor="slurm"))


def test_scontrol_fields_are_parsed() -> None:
    fields = parse_fields("JobId=7 JobName=a JobState=NODE_FAIL Reason=NodeDown ExitCode=0:1 CPUs/Task=1 X=(null)")
    assert (fields["JobState"], fields["ExitCode"], fields["CPUs/Task"]) == ("NODE_FAIL", "0:1", "1")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    if os.geteuid() != 0 or any(shutil.which(name) is None for name in ("slurmctld", "slurmd", "munged", "sbatch")):
        pytest.skip("needs root, slurm-wlm and munge (scripts/install_system.sh)")
    folder = tmp_path_factory.mktemp("slurm")
    for parent in folder.parents[:3]:
        if parent.stat().st_uid == os.geteuid() and parent.name.startswith("pytest"):
            parent.chmod(0o755)
    script = str(ROOT / "scripts" / "setup_slurm.sh")
    environment = {**os.environ, "SLURM_PORT": "27817"}
    try:
        subprocess.run([script, "start", str(folder)], env=environment, check=True, capture_output=True, timeout=90)
        yield folder / "slurm.conf"
    finally:
        subprocess.run([script, "stop", str(folder)], check=True)


@pytest.fixture
def cluster(slurm: Path, toy: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working Slurm; returns the gate."""
    monkeypatch.setenv("SLURM_CONF", str(slurm))
    node = subprocess.run(["sinfo", "-h", "-o", "%n"], capture_output=True, text=True, check=True).stdout.strip()
    subprocess.run(["scontrol", "update", f"nodename={node}", "state=resume"], capture_output=True)
    monkeypatch.setenv("SLURM_NODE_UNDER_TEST", node)
    return toy


SLURM = SlurmProfile(executor="slurm", time="00:30:00")


@pytest.mark.slurm
def test_slurm_runs_the_chain(store: ArtifactStore, cluster: Path) -> None:
    info = submit(store, SLURM)
    assert info.executor == "slurm" and info.job.isdigit()
    text: list[str] = []
    info = launching.follow(store, info.id, text.append)
    assert info.status == "done" and "step 10:" in "".join(text)
    assert store.find("toy/train/model").producer is not None
    wait_until(lambda: SlurmExecutor().status(info.job).state is JobState.DONE)
    assert SlurmExecutor().status("999999").state is JobState.LOST


@pytest.mark.slurm
def test_slurm_failure_is_raised_as_it_was(store: ArtifactStore, cluster: Path) -> None:
    info = submit(store, SLURM, "train.fail=nan")
    with pytest.raises(NonFiniteLossError):
        launching.follow(store, info.id, lambda text: None)
    wait_until(lambda: SlurmExecutor().status(info.job).state is JobState.FAILED)
    assert "exit code 1:0" in SlurmExecutor().status(info.job).detail


@pytest.mark.slurm
def test_slurm_job_is_cancelled_saves_and_goes_on(store: ArtifactStore, cluster: Path) -> None:
    cluster.touch()
    run_id = submit(store, SLURM).id
    wait_until(lambda: any(m["index"] == 4 for m in read_events(store, run_id, "metrics")))
    waiting = submit(store, SlurmProfile(executor="slurm", exclusive=True))
    wait_until(lambda: SlurmExecutor().status(waiting.job).state is JobState.PENDING)
    launching.cancel(store, waiting)
    with pytest.raises(InterruptedRunError, match="cancelled"):
        launching.follow(store, waiting.id, lambda text: None)
    launching.cancel(store, get_run(store, run_id))
    with pytest.raises(InterruptedRunError, match="SIGTERM"):
        launching.follow(store, run_id, lambda text: None)
    cluster.unlink()
    submit(store, SLURM, run_id=run_id)
    assert launching.follow(store, run_id, lambda text: None).status == "done"
    assert [e["fields"]["step"] for e in read_events(store, run_id) if e.get("name") == "loaded"] == [0, 4]


@pytest.mark.slurm
def test_slurm_refusal_is_a_request_error(store: ArtifactStore, cluster: Path) -> None:
    with pytest.raises(RequestError, match="Invalid partition"):
        submit(store, SlurmProfile(executor="slurm", partition="no-such-partition"))


@pytest.mark.slurm
@pytest.mark.parametrize("dead", [False, True], ids=["out of reach", "dead"])
def test_lost_node_is_retryable(store: ArtifactStore, cluster: Path, dead: bool) -> None:
    cluster.touch()
    run_id = submit(store, SLURM).id
    wait_until(lambda: any(m["index"] == 4 for m in read_events(store, run_id, "metrics")))
    node = os.environ["SLURM_NODE_UNDER_TEST"]
    subprocess.run(["scontrol", "update", f"nodename={node}", "state=down", "reason=test"], check=True)
    wait_until(lambda: SlurmExecutor().status(get_run(store, run_id).job).state is JobState.LOST)
    pid = get_run(store, run_id).pid
    if dead:  # which shows in the run before anyone asks the executor why
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: get_run(store, run_id).status in ("killed", "interrupted"))  # Slurm may have asked first
    with pytest.raises((WorkerLostError, InterruptedRunError)) as caught:
        launching.follow(store, run_id, lambda text: None)
    assert any(f"--resume {run_id}" in hint for hint in caught.value.hints)
    cluster.unlink()
    wait_until(lambda: not Path(f"/proc/{pid}").exists())


@pytest.mark.slurm
def test_command_line_runs_under_a_slurm_profile(
    cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = ROOT / "tests" / "cli" / "toy_pack"
    (tmp_path / "env.toml").write_text('[cluster]\nexecutor = "slurm"\ntime = "00:30"\n')
    environment = {
        **os.environ,
        "STEPS_PATH": str(pack),
        "STEPS_HOME": str(tmp_path / "home"),
        "PYTHONPATH": f"{ROOT}:{pack}",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }

    def steps(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "nemotron_steps.cli.main", *words]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)

    attached = steps("run", "toy/train", "-c", "tiny", "-r", "cluster")
    assert attached.returncode == 0, attached.stdout + attached.stderr
    assert re.search(r"submitted as \S+ \(slurm job \d+\)", attached.stdout)
    assert "[toy/train] step 1:" in attached.stdout and "run done in" in attached.stdout
    failed = steps("run", "toy/train", "-c", "tiny", "end=judge", "-r", "cluster")
    assert failed.returncode == 3 and "error[E700]" in failed.stderr, failed.stdout + failed.stderr
    secret = steps("run", "toy/train", "-c", "tiny", "judge.api_key=sk-123456", "-b", "cluster")
    assert secret.returncode == 2 and "sk-123456" not in secret.stderr
    store = ArtifactStore(tmp_path / "home")
    assert get_run(store, "latest").request["profile"] == "cluster"
    assert get_run(store, "latest").executor == "slurm"
    script = (tmp_path / "home/runs" / get_run(store, "latest").id / "slurm.sh").read_text()
    assert "end=judge" not in script and "--resume" in script
