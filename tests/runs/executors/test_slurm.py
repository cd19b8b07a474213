"""The slurm executor: its batch script everywhere, a real Slurm where it is installed."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.errors import (
    InterruptedRunError,
    RequestError,
    WorkerLostError,
)
from nemotron_steps.runs import launch as launching
from nemotron_steps.runs.executors.base import JobState, Launch
from nemotron_steps.runs.executors.slurm import (
    SlurmExecutor,
    SlurmProfile,
    batch_script,
    parse_fields,
)
from nemotron_steps.runs.run_folder import get_run, read_events
from tests.runs.executors.jobs import ROOT, submit, wait_until


@pytest.mark.parametrize(
    ("keys", "attached", "expected"),
    [
        ({"partition": "all"}, True, "all"),
        ({"partition": "all", "run_partition": "quick"}, True, "quick"),
        ({"partition": "all", "batch_partition": "long"}, False, "long"),
    ],
)
def test_slurm_partitions_of_attached_and_detached_runs(
    tmp_path: Path, keys: dict[str, str], attached: bool, expected: str | None
) -> None:
    script = batch_script(replace(a_launch(tmp_path, **keys), attached=attached))
    found = re.search(r"^#SBATCH --partition=(.*)$", script, re.MULTILINE)
    assert (found[1] if found else None) == expected


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
        "signal": "B:USR1@120",
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
    assert "ray start --disable-usage-stats --block --head" in script and 'export RAY_ADDRESS="$address:' in script
    assert f"--container-mounts=/data:/data,{tmp_path}:{tmp_path} " in script  # the home, artifacts included
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


def test_apptainer_runs_everything_in_its_image(tmp_path: Path) -> None:
    keys = {"container_runtime": "apptainer", "container_image": "nvcr.io/nvidia/nemo:25.09", "mounts": ["/data:/data"]}
    script = batch_script(a_launch(tmp_path, nodes=2, gpus_per_node=8, **keys))
    file = f"{tmp_path}/containers/nvcr.io+nvidia+nemo+25.09.sif"
    assert f"image={file}" in script and 'apptainer pull "$image.$SLURM_JOB_ID" docker://nvcr.io' in script
    inside = f'apptainer exec --nv --bind /data:/data --bind {tmp_path}:{tmp_path} --pwd {tmp_path} "$image" '
    assert f"--ntasks=1 {inside}steps run --resume r1" in script
    assert script.count(f"env -u RAY_ADDRESS {inside}ray start") == 2
    assert "--container" not in script and "--nv" not in batch_script(a_launch(tmp_path, **keys))
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    ready = batch_script(a_launch(tmp_path, container_runtime="apptainer", container_image="/i/nemo.sif"))
    assert "pull" not in ready and "image=/i/nemo.sif" in ready


def test_an_image_that_is_not_there_is_refused_before_anything_is_submitted(store: ArtifactStore) -> None:
    with pytest.raises(RequestError, match="image is not there") as caught:
        submit(store, SlurmProfile(executor="slurm", container_image="/images/gone.sqsh"))
    assert caught.value.found == "/images/gone.sqsh" and get_run(store, "latest").status == "failed"


@pytest.mark.parametrize(
    ("code", "signalled", "restarts", "again"),
    [(3, "", 0, True), (3, "", 2, False), (1, "", 0, False), (0, "USR1", 0, False), (130, "USR1", 1, True),
     (130, "TERM", 0, False), (3, "TERM", 0, False)],
)  # fmt: skip
def test_a_job_goes_back_into_the_queue_at_its_limit_or_where_trying_again_may_help(
    tmp_path: Path, code: int, signalled: str, restarts: int, again: bool
) -> None:
    script = batch_script(a_launch(tmp_path, requeue=2))
    assert "#SBATCH --requeue\n" in script
    command = script[script.index("\n", script.index("set -u")) :].replace("sleep 60", "true")
    signal_me = f"kill -{signalled} $PPID; sleep 0.3; " if signalled else ""
    started = f"bash -c 'trap \"exit {code}\" TERM; {signal_me}exit {code}' &"
    command = re.sub(r"^.*nemotron_steps\.cli\.main.*&$", lambda _: started, command, flags=re.MULTILINE)
    stub = 'scontrol() { echo "scontrol $*"; }\n'
    environment = {**os.environ, "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(restarts)}
    ended = subprocess.run(["bash", "-c", stub + command], env=environment, capture_output=True, text=True, timeout=20)
    assert ("scontrol requeue 7" in ended.stdout, ended.returncode) == (again, code)


def test_multi_line_profile_values_cannot_add_script_lines(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="one line"):
        batch_script(a_launch(tmp_path, account="x\nrm -rf y"))


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    if os.geteuid() != 0 or any(shutil.which(name) is None for name in ("slurmctld", "slurmd", "munged", "sbatch")):
        pytest.skip("needs root, slurm-wlm and munge (scripts/install_system.sh)")
    folder = tmp_path_factory.mktemp("slurm")
    for parent in folder.parents[:3]:
        if parent.stat().st_uid == os.geteuid() and parent.name.startswith("pytest"):
            parent.chmod(0o755)
    script = str(ROOT / "scripts" / "setup_slurm.sh")
    environment = {**os.environ, "SLURM_PORT": "27817", "SLURM_NODES": "2"}
    try:
        subprocess.run([script, "start", str(folder)], env=environment, check=True, capture_output=True, timeout=90)
        yield folder / "slurm.conf"
    finally:
        subprocess.run([script, "stop", str(folder)], check=True)


@pytest.fixture
def cluster(slurm: Path, toy: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working Slurm; returns the gate."""
    monkeypatch.setenv("SLURM_CONF", str(slurm))
    for node in ("node1", "node2"):
        subprocess.run(["scontrol", "update", f"nodename={node}", "state=resume"], capture_output=True)
    return toy


def field_of(job: str, name: str) -> str:
    """What the controller says about a job."""
    command = ["scontrol", "show", "job", job, "--oneliner"]
    return parse_fields(subprocess.run(command, capture_output=True, text=True, check=True).stdout)[name]


SLURM = SlurmProfile(executor="slurm", time="00:30:00")


@pytest.mark.slurm
def test_slurm_job_is_cancelled_saves_and_goes_on(store: ArtifactStore, cluster: Path) -> None:
    cluster.touch()
    run_id = submit(store, SLURM).id
    wait_until(lambda: any(m["index"] == 4 for m in read_events(store, run_id, "metrics")))
    waiting = submit(store, SlurmProfile(executor="slurm", nodes=2, exclusive=True))
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
def test_a_job_near_its_limit_goes_back_into_the_queue_and_goes_on(store: ArtifactStore, cluster: Path) -> None:
    cluster.touch()
    info = submit(store, SLURM.model_copy(update={"requeue": 1}))
    wait_until(lambda: any(m["index"] == 4 for m in read_events(store, info.id, "metrics")))
    subprocess.run(["scancel", "--signal=USR1", "--batch", info.job], check=True)  # as Slurm does near the limit
    wait_until(lambda: field_of(info.job, "Restarts") == "1")
    # Slurm would wait two minutes.
    wait_until(lambda: SlurmExecutor().status(info.job).state is JobState.PENDING)
    time.sleep(2)  # slurmd refuses a start in the second in which it ended the job before
    subprocess.run(["scontrol", "update", f"jobid={info.job}", "starttime=now"], check=True)
    cluster.unlink()
    assert launching.follow(store, info.id, lambda text: None).status == "done"
    assert [e["fields"]["step"] for e in read_events(store, info.id) if e.get("name") == "loaded"] == [0, 4]
    wait_until(lambda: SlurmExecutor().status(info.job).state is JobState.DONE)


@pytest.mark.slurm
@pytest.mark.ray
def test_a_step_on_ray_joins_the_cluster_over_the_jobs_nodes(
    store: ArtifactStore, cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "told.json"
    program = (
        "import json, ray, socket, time\n"
        "from nemotron_steps.config.schema.rl import ClusterConfig\n"
        "from nemotron_steps.engine.placement.cluster import RayCluster\n"
        "cluster = RayCluster(ClusterConfig(backend='ray', num_nodes=2))\n"
        "deadline = time.monotonic() + 90\n"
        "while sum(n['Alive'] for n in ray.nodes()) < 2 and time.monotonic() < deadline: time.sleep(0.2)\n"
        f"open({str(told)!r}, 'w').write(json.dumps(sum(n['Alive'] for n in ray.nodes())))\n"
        "cluster.close()\n"
    )
    monkeypatch.setattr(Launch, "command", lambda self, **_: [sys.executable, "-c", program])
    info = submit(store, SLURM.model_copy(update={"nodes": 2}))
    wait_until(lambda: SlurmExecutor().status(info.job).state.over, 150)
    output = next((store.backend.scratch / "runs" / info.id).glob("slurm-*.txt")).read_text()
    assert SlurmExecutor().status(info.job).state is JobState.DONE, output
    assert told.read_text() == "2"


@pytest.mark.slurm
def test_a_cluster_is_reached_through_ssh(
    store: ArtifactStore, cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ssh is a program that does what it is told in a shell of its own, with the job's folder as its only common file
    system."""
    there, asked = tmp_path / "there", tmp_path / "asked"
    there.mkdir()
    fake = tmp_path / "bin" / "ssh"
    fake.parent.mkdir()
    fake.write_text(f'#!/bin/bash\necho "${{@:1:$#-1}}" >> {asked}\nexec env -u LAST_SEEN bash -c "${{@: -1}}"\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(launching, "_FETCH_S", 0.5)
    keys = {
        "tunnel": "ssh",
        "host": "login.example",
        "user": "me",
        "identity": "/keys/id",
        "remote_job_dir": str(there),
    }
    profile = SlurmProfile.model_validate(
        {"executor": "slurm", "time": "00:30:00", **keys, "env_vars": {"SITE_TOKEN": "hf_1234567890"}}
    )
    cluster.touch()
    info = submit(store, profile)
    assert info.job.startswith("ssh://me@login.example/") and "hf_1234567890" not in asked.read_text()
    wait_until(lambda: any(m["index"] == 4 for m in read_events(store, launching.refresh(store, info).id, "metrics")))
    assert launching.job_status(store, get_run(store, info.id)).state is JobState.RUNNING
    launching.cancel(store, get_run(store, info.id))
    with pytest.raises(InterruptedRunError, match="SIGTERM"):
        launching.follow(store, info.id, lambda text: None)
    cluster.unlink()
    submit(store, profile, run_id=info.id)
    text: list[str] = []
    assert launching.follow(store, info.id, text.append).status == "done" and "step 10:" in "".join(text)
    home = ArtifactStore(there / ".steps")
    assert home.find("toy/train/model").producer is not None and "-l me -- login.example" in asked.read_text()
    assert "-i /keys/id" in asked.read_text()
    assert not any(b"hf_1234567890" in file.read_bytes() for file in there.rglob("*") if file.is_file())


@pytest.mark.slurm
def test_lost_node_is_retryable(store: ArtifactStore, cluster: Path) -> None:
    cluster.touch()
    run_id = submit(store, SLURM).id
    wait_until(lambda: any(m["index"] == 4 for m in read_events(store, run_id, "metrics")))
    node = field_of(get_run(store, run_id).job, "NodeList")
    subprocess.run(["scontrol", "update", f"nodename={node}", "state=down", "reason=test"], check=True)
    wait_until(lambda: SlurmExecutor().status(get_run(store, run_id).job).state is JobState.LOST)
    pid = get_run(store, run_id).pid
    with pytest.raises((WorkerLostError, InterruptedRunError)) as caught:
        launching.follow(store, run_id, lambda text: None)
    assert any(f"--resume {run_id}" in hint for hint in caught.value.hints)
    cluster.unlink()
    wait_until(lambda: not Path(f"/proc/{pid}").exists())
