"""The ray executor: what it asks of Ray everywhere, a real cluster of one node where Ray's job API is installed."""

import importlib.util
import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.errors import InterruptedRunError, NonFiniteLossError, RequestError, RetryableError
from nemotron_steps.runs import launch as launching
from nemotron_steps.runs.executors import ray_jobs
from nemotron_steps.runs.executors.base import JobState, JobStatus, Launch
from nemotron_steps.runs.executors.ray_jobs import RayExecutor, RayProfile, job_request
from nemotron_steps.runs.run_folder import get_run, read_events
from tests.runs.executors.jobs import ROOT, submit, wait_until

has_job_api = importlib.util.find_spec("aiohttp_cors") is not None or bool(os.environ.get("CI"))
needs_job_api = pytest.mark.skipif(not has_job_api, reason="Ray's job API is not installed: make setup-test")


def a_launch(tmp_path: Path, **profile: object) -> Launch:
    arguments = ("--resume", "r1", "--home", str(tmp_path))
    return Launch(
        "r1",
        tmp_path / "runs/r1",
        arguments,
        RayProfile(executor="ray", **profile),
        tmp_path / "a b",
        {"STEPS_JOB": "r1"},
    )


def test_a_job_works_in_the_folder_it_was_submitted_from_after_the_profiles_lines(tmp_path: Path) -> None:
    request = job_request(a_launch(tmp_path, setup_lines=["ulimit -n 65536"], env_vars={"HF_HOME": "/hf"}))
    shell, flag, script = shlex.split(request["entrypoint"])
    assert (shell, flag) == ("bash", "-c")
    first, second, last = script.splitlines()
    assert (first, second) == ("ulimit -n 65536", f"cd '{tmp_path}/a b'")
    assert last.startswith("exec ") and shlex.split(last)[-4:] == ["--resume", "r1", "--home", str(tmp_path)]
    variables = request["runtime_env"]["env_vars"]
    assert (variables["HF_HOME"], variables["STEPS_JOB"]) == ("/hf", "r1")
    assert int(variables["RAY_JOB_STOP_WAIT_TIME_S"]) >= 60
    assert request["submission_id"] != job_request(a_launch(tmp_path))["submission_id"]
    # It takes no core from the actors that it starts, and Ray does not refuse what both of them set.
    assert (request["entrypoint_num_cpus"], variables["RAY_OVERRIDE_JOB_RUNTIME_ENV"]) == (0, "1")


def test_a_secret_is_not_handed_to_ray_which_would_show_it(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="secrets") as caught:
        job_request(a_launch(tmp_path, env_vars={"HF_TOKEN": "hf_abcdefgh", "MODE": "x"}))
    assert caught.value.found == "HF_TOKEN" and "abcdefgh" not in str(caught.value)


@pytest.mark.ray
def test_a_cluster_that_is_not_there_is_retryable(store: ArtifactStore) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        profile = RayProfile(executor="ray", ray_address=f"http://127.0.0.1:{free.getsockname()[1]}")
    with pytest.raises(RetryableError, match="no Ray cluster answers"):
        submit(store, profile)
    assert get_run(store, "latest").status == "failed"


@pytest.mark.ray
@pytest.mark.parametrize(
    ("status", "exit_code", "state"),
    [
        ("PENDING", None, JobState.PENDING),
        ("RUNNING", None, JobState.RUNNING),
        ("SUCCEEDED", 0, JobState.DONE),
        ("FAILED", 3, JobState.FAILED),
        ("FAILED", None, JobState.LOST),  # its node went, and no process of the job's ended
        ("STOPPED", None, JobState.CANCELLED),
    ],
)
def test_states_of_a_job(monkeypatch: pytest.MonkeyPatch, status: str, exit_code: int | None, state: JobState) -> None:
    info = SimpleNamespace(status=SimpleNamespace(value=status), message="why\nmore", driver_exit_code=exit_code)
    client = SimpleNamespace(get_job_info=lambda submission: info if submission == "run-1" else None)
    monkeypatch.setattr(ray_jobs, "_client", {"http://head:8265": client}.__getitem__)
    assert RayExecutor().status("http://head:8265/run-1") == JobStatus(state, "why")


@pytest.mark.ray
def test_a_job_is_lost_where_the_cluster_does_not_know_it_and_not_where_it_cannot_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = "Request failed with status code 404: Job run-1 does not exist"

    class Client:
        def get_job_info(self, submission: str) -> object:
            raise RuntimeError(said)

    monkeypatch.setattr(ray_jobs, "_client", lambda address: Client())
    assert RayExecutor().status("http://head:8265/run-1").state is JobState.LOST
    said = "Request failed with status code 500: the control store is down"
    with pytest.raises(RequestError, match="refused"):
        RayExecutor().status("http://head:8265/run-1")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Ray cluster of one node, on loopback alone; the address of its dashboard."""
    from ray.job_submission import JobSubmissionClient

    with socket.socket() as free, socket.socket() as also_free:
        free.bind(("127.0.0.1", 0))
        also_free.bind(("127.0.0.1", 0))
        port, agent_port = free.getsockname()[1], also_free.getsockname()[1]
    folder = Path("/tmp") / f"steps-ray-{os.getpid()}"  # Ray's sockets have a short limit on their paths
    # What Ray's client does about tokens is settled when it is first imported, which may be long ago.
    ours = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ours.items():
            patch.setenv(name, value)
        patch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests' / 'runs'}")
        gate = tmp_path_factory.mktemp("gate") / "gate"
        patch.setenv("TOY_GATE", str(gate))
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
        command += [
            "--num-cpus=1",
            "--port=0",
            f"--dashboard-port={port}",
            "--dashboard-host=127.0.0.1",
            "--include-dashboard=true",
            f"--dashboard-agent-listen-port={agent_port}",  # the usual one may be another test's cluster's
            "--node-ip-address=127.0.0.1",
            f"--temp-dir={folder}",
            "--disable-usage-stats",
            '--resources={"of_this_test": 7}',
        ]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            address = f"http://127.0.0.1:{port}"

            def answers() -> bool:
                assert process.poll() is None, "ray start ended"
                try:
                    JobSubmissionClient(address).list_jobs()
                except (ConnectionError, RuntimeError):
                    return False
                return True

            wait_until(answers, 90)
            yield address
        finally:
            process.terminate()
            process.wait(timeout=60)
            subprocess.run(["rm", "-rf", str(folder)], check=False)


@pytest.fixture
def profile(cluster: str, toy: Path) -> RayProfile:
    return RayProfile(executor="ray", ray_address=cluster)


@pytest.mark.ray
@needs_job_api
def test_a_ray_job_runs_fails_is_cancelled_and_goes_on(store: ArtifactStore, profile: RayProfile, toy: Path) -> None:
    gated = profile.model_copy(update={"env_vars": {"TOY_GATE": str(toy)}})
    toy.touch()
    run_id = submit(store, gated).id
    text: list[str] = []
    wait_until(lambda: any(m["index"] == 4 for m in read_events(store, run_id, "metrics")))
    job = get_run(store, run_id).job
    assert RayExecutor().status(job).state is JobState.RUNNING
    launching.cancel(store, get_run(store, run_id))
    with pytest.raises(InterruptedRunError, match="SIGTERM"):
        launching.follow(store, run_id, text.append)
    wait_until(lambda: RayExecutor().status(job).state is JobState.CANCELLED)
    toy.unlink()
    submit(store, gated, run_id=run_id)
    assert launching.follow(store, run_id, text.append).status == "done"
    assert [e["fields"]["step"] for e in read_events(store, run_id) if e.get("name") == "loaded"] == [0, 4]
    assert "step 10:" in "".join(text)
    failing = submit(store, gated, "train.fail=nan")
    with pytest.raises(NonFiniteLossError, match="step 5"):
        launching.follow(store, failing.id, lambda text: None)
    wait_until(lambda: RayExecutor().status(failing.job).state is JobState.FAILED)
    assert RayExecutor().status(f"{profile.ray_address}/nobody").state is JobState.LOST


@pytest.mark.ray
@needs_job_api
def test_a_step_on_ray_joins_the_cluster_its_job_runs_on(
    store: ArtifactStore, profile: RayProfile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "told.json"
    program = (
        "import json, ray\n"
        "from nemotron_steps.config.schema.rl import ClusterConfig\n"
        "from nemotron_steps.engine.placement.cluster import RayCluster\n"
        "cluster = RayCluster(ClusterConfig(backend='ray'))\n"
        f"open({str(told)!r}, 'w').write(json.dumps(ray.cluster_resources()))\n"
        "cluster.close()\n"
    )
    monkeypatch.setattr(Launch, "command", lambda self, **_: [sys.executable, "-c", program])
    info = submit(store, profile)
    wait_until(lambda: RayExecutor().status(info.job).state.over)
    assert RayExecutor().status(info.job).state is JobState.DONE
    assert json.loads(told.read_text())["of_this_test"] == 7
