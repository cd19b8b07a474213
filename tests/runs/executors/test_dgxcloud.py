"""The dgxcloud executor: the workload it compiles to, held to Run:ai's own types, and a server that plays its API."""

from __future__ import annotations

import http.server
import json
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.config.profiles import load_environment
from nemotron_steps.errors import ConfigError, RequestError, RetryableError
from nemotron_steps.runs import launch as launching
from nemotron_steps.runs.executors.base import JobState, Launch, profile_model
from nemotron_steps.runs.executors.dgxcloud import (
    STATES,
    DGXCloudExecutor,
    DGXCloudProfile,
    job_script,
    workload_request,
)
from nemotron_steps.runs.executors.runai_api import Account, _token
from nemotron_steps.runs.run_folder import RunFolder, get_run
from tests.runs.executors.jobs import submit
from tests.runs.executors.sdks import asked, needs_sdks

SECRET = "qwertyuiop0123456789"


def profile_of(mounted: Path, **keys: Any) -> DGXCloudProfile:
    values = {
        "executor": "dgxcloud",
        "project_name": "alignment",
        "container_image": "nvcr.io/acme/nemotron-steps:cuda",
        "pvcs": [{"path": str(mounted), "claimName": "lustre"}],
    }
    return DGXCloudProfile.model_validate({**values, **keys})


def a_launch(tmp_path: Path, **keys: Any) -> Launch:
    words = ("--resume", "r1", "--home", str(tmp_path / "home"))
    profile = profile_of(tmp_path, **keys)
    return Launch("r1", tmp_path / "home/runs/r1", words, profile, tmp_path, {"STEPS_JOB": "r1"})


WHOLE: dict[str, Any] = {
    "nodes": 3,
    "gpus_per_node": 8,
    "env_vars": {"MODE": "x"},
    "secret_vars": {"HF_TOKEN": {"name": "tokens", "key": "hf"}},
    "setup_lines": ["ulimit -n 65536"],
    "image_pull_secrets": ["ngc"],
    "custom_spec": {"nodePools": ["h100"], "priorityClass": "high"},
}


def test_a_profile_becomes_a_distributed_workload(tmp_path: Path) -> None:
    request = workload_request(a_launch(tmp_path, **WHOLE))
    spec = request["spec"]
    # Two workers and the master are three nodes.
    assert (spec["numWorkers"], spec["distributedFramework"], request["masterSpecSameAsWorker"]) == (2, "PyTorch", True)
    assert spec["compute"] == {"largeShmRequest": True, "gpuDevicesRequest": 8}
    assert spec["storage"]["pvc"] == [
        {"path": str(tmp_path), "claimName": "lustre", "existingPvc": True, "readOnly": False}
    ]
    assert spec["environmentVariables"] == [
        {"name": "MODE", "value": "x"},
        {"name": "STEPS_JOB", "value": "r1"},
        {"name": "HF_TOKEN", "secret": {"name": "tokens", "key": "hf"}},
    ]
    assert spec["command"] == f"/bin/bash {tmp_path}/home/runs/r1/dgxcloud.sh"
    assert (spec["restartPolicy"], spec["backoffLimit"], spec["nodePools"]) == ("Never", 0, ["h100"])
    assert spec["terminationGracePeriodSeconds"] == 120
    assert (spec["imagePullSecrets"], spec["imagePullPolicy"]) == ([{"name": "ngc"}], "IfNotPresent")
    single = workload_request(replace(a_launch(tmp_path), force_squash=True))
    assert "numWorkers" not in single["spec"] and "masterSpecSameAsWorker" not in single
    assert (single["spec"]["compute"], single["spec"]["imagePullPolicy"]) == ({"largeShmRequest": True}, "Always")


def test_a_workloads_own_spec_goes_first(tmp_path: Path) -> None:
    own = {"imagePullPolicy": "Never", "terminationGracePeriodSeconds": 5}
    assert own.items() <= workload_request(a_launch(tmp_path, custom_spec=own))["spec"].items()


def test_one_of_several_volumes_holds_the_home(tmp_path: Path) -> None:
    volumes = [{"path": str(path), "claimName": "data"} for path in ("/data", tmp_path, "/more")]
    assert len(workload_request(a_launch(tmp_path, pvcs=volumes))["spec"]["storage"]["pvc"]) == 3


def test_what_a_pod_prints_goes_on_behind_what_an_earlier_one_printed_and_the_profiles_lines_come_first(
    tmp_path: Path,
) -> None:
    launch = a_launch(tmp_path, setup_lines=["echo of the profile"])
    launch.folder.mkdir(parents=True)
    (tmp_path / "steps").write_text("#!/bin/sh\necho of the run\n")
    (tmp_path / "steps").chmod(0o755)
    (launch.folder / "console-pod.txt").write_text("of an earlier pod\n")
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOSTNAME": "pod"}
    subprocess.run(["bash", "-c", job_script(launch)], env=environment, check=True, stdout=subprocess.DEVNULL)
    said = ["of an earlier pod", "of the profile", "of the run"]
    assert (launch.folder / "console-pod.txt").read_text().splitlines() == said


def test_a_workload_is_over_in_the_phases_in_which_nothing_more_happens() -> None:
    by_state: dict[JobState, set[str]] = {}
    for phase, state in STATES.items():
        by_state.setdefault(state, set()).add(phase)
    assert by_state == {
        JobState.PENDING: {"Creating", "Initializing", "Pending", "Resuming"},
        JobState.RUNNING: {"Running", "Updating", "Degraded", "Stopping", "Terminating", "Unknown"},
        JobState.CANCELLED: {"Stopped", "Deleting"},
        JobState.DONE: {"Completed"},
        JobState.FAILED: {"Failed"},
    }


@needs_sdks
def test_run_ai_takes_the_workload(tmp_path: Path) -> None:
    ids = {"projectId": "7", "clusterId": "71f69d83-ba66-4822-adf5-55ce55efd210"}
    requests = [workload_request(a_launch(tmp_path, **keys)) | ids for keys in (WHOLE, {})]
    # The generated types leave unknown keys out: what comes back whole was known.
    answer = asked(
        "from runai.models import DistributedCreationRequest, Phase, TrainingCreationRequest\n"
        "kinds = (DistributedCreationRequest, TrainingCreationRequest)\n"
        "made = [kind.from_dict(body).to_dict() for kind, body in zip(kinds, request)]\n"
        "answer = {'made': made, 'phases': [phase.value for phase in Phase]}",
        requests,
    )
    assert [_lost(before, after) for before, after in zip(requests, answer["made"], strict=True)] == [[], []]
    assert set(answer["phases"]) == set(STATES)


def _lost(before: Any, after: Any, at: str = "") -> list[str]:
    """Where `after` has not what `before` has."""
    if isinstance(before, dict):
        return [lost for key in before for lost in _lost(before[key], (after or {}).get(key), f"{at}.{key}")]
    if isinstance(before, list):
        pairs = zip(before, [*(after or []), *[None] * len(before)], strict=False)
        return [lost for number, (a, b) in enumerate(pairs) for lost in _lost(a, b, f"{at}[{number}]")]
    return [] if before == after else [f"{at}: {before!r} is {after!r}"]


@pytest.mark.parametrize("addresses", ["10.0.0.7", "10.0.0.7 fd00::7", "fd00::7 10.0.0.7 10.0.0.8"])
@pytest.mark.parametrize(("rank", "said"), [("0", "head\n10.0.0.7 none"), ("1", "worker\nmaster-0 none")])
def test_each_pod_does_its_part(tmp_path: Path, rank: str, said: str, addresses: str) -> None:
    """Run with programs that say how they were called: `ray start` on every node, the run on the first alone.

    A pod may have addresses of both kinds.
    """
    launch = a_launch(tmp_path, nodes=2)
    launch.folder.mkdir(parents=True)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, line in {
        "ray": '[ "$3" = --head ] || [ "$4" = --head ] && echo head || echo worker; '
        'echo "${RAY_ADDRESS:-$head} ${WORLD_SIZE:-none}"',
        "steps": 'echo "steps $* at $RAY_ADDRESS with ${WORLD_SIZE:-none}"',
        "hostname": f"echo {addresses}",
    }.items():
        (programs / name).write_text(f"#!/bin/bash\n{line}\n")
        (programs / name).chmod(0o755)
    # A port that answers once, then no more: the first node came up, and ended.
    script = job_script(launch).replace("(exec 3<>/dev/tcp/$head/26379)", "{ [ ! -e gone ] && touch gone; }")
    script = script.replace("sleep 5", "exit 9").replace('export RAY_ADDRESS="$head', 'export head RAY_ADDRESS="$head')
    environment = {"PATH": f"{programs}:/usr/bin:/bin", "HOSTNAME": "pod", "RANK": rank, "WORLD_SIZE": "2"}
    environment |= {"MASTER_ADDR": "master-0", "MASTER_PORT": "23456"}
    done = subprocess.run(["bash", "-c", script], env=environment, cwd=tmp_path, capture_output=True, text=True)
    console = (launch.folder / "console-pod.txt").read_text()
    assert done.returncode == 0, console
    assert console.startswith(said) and done.stdout == f"output: {launch.folder}/console-pod.txt\n"
    assert (f"steps run --resume r1 --home {tmp_path}/home at 10.0.0.7:26379 with none" in console) == (rank == "0")


@pytest.mark.parametrize("seen", [True, False])
def test_the_run_works_where_it_was_submitted_if_its_pod_sees_that_folder(tmp_path: Path, seen: bool) -> None:
    folder = tmp_path / "my work"
    launch = replace(a_launch(tmp_path), working_dir=folder)
    for made in (launch.folder, tmp_path / "bin", *([folder] if seen else [])):
        made.mkdir(parents=True)
    (tmp_path / "bin/steps").write_text("#!/bin/bash\npwd\n")
    (tmp_path / "bin/steps").chmod(0o755)
    environment = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "HOSTNAME": "pod"}
    done = subprocess.run(["bash", "-c", job_script(launch)], env=environment, cwd=tmp_path / "bin")
    console = (launch.folder / "console-pod.txt").read_text()
    assert (done.returncode, console) == (0, f"{folder if seen else tmp_path / 'bin'}\n")


def test_a_home_that_the_workload_could_not_write_to_is_refused(store: ArtifactStore, tmp_path: Path) -> None:
    read_only = {"path": str(tmp_path), "claimName": "lustre", "readOnly": True}
    for profile in (profile_of(Path("/elsewhere")), profile_of(tmp_path, pvcs=[read_only])):
        with pytest.raises(RequestError, match="would not see the home") as caught:
            submit(store, profile)
        assert "claimName" in caught.value.hints[0] and get_run(store, "latest").status == "failed"


def test_a_secret_comes_from_the_projects_namespace_alone(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="these are secrets") as caught:
        workload_request(a_launch(tmp_path, env_vars={"HF_TOKEN": f"hf_{SECRET}"}))
    assert caught.value.hints == ('secret_vars = { HF_TOKEN = { name = "SECRET", key = "HF_TOKEN" } }',)
    assert SECRET not in str(caught.value)


def test_a_key_of_nemo_runs_that_would_do_nothing_says_where_its_value_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "env.toml").write_text(
        f'[cloud]\nexecutor = "dgxcloud"\nproject_name = "a"\ncontainer_image = "b"\napp_secret = "{SECRET}"\n'
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="RUNAI_APP_SECRET") as caught:
        load_environment(tmp_path).profile("cloud", profile_model)
    assert SECRET not in str(caught.value)


class RunAi(http.server.ThreadingHTTPServer):
    """Run:ai's API, as documented, as far as jobs ask: what it was asked, and what it is to answer."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[str, str, Any]] = []
        self.phase = "Running"
        self.message = ""
        self.odd = b""
        """What it answers instead of the workload."""
        self.odd_status = HTTPStatus.OK
        self.tokens = 0
        self.down = HTTPStatus.OK
        self.projects = [{"name": "alignment", "id": "7", "clusterId": "c1"}]

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: RunAi

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "null"))

    def _answer(self, body: Any) -> None:
        path = self.path.partition("?")[0].removeprefix("/api/v1")
        self.server.asked.append((self.command, path, body))
        status, answer = self._told(path, body)
        text = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        if status in (HTTPStatus.FOUND, HTTPStatus.TEMPORARY_REDIRECT):
            self.send_header("Location", f"{self.server.address}/elsewhere")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _told(self, path: str, body: Any) -> tuple[int, Any]:
        if self.server.down != HTTPStatus.OK:
            return self.server.down, {"code": int(self.server.down), "message": "no quota left"}
        if path == "/token":
            if body == {"grantType": "client_credentials", "clientId": "me", "clientSecret": SECRET} or body == {
                "grantType": "app_token",
                "appId": "app",
                "appSecret": SECRET,
            }:
                self.server.tokens += 1
                return 200, {"accessToken": f"token-{self.server.tokens}"}
            return 403, {"code": 403, "message": "Account is not fully set up"}
        if self.headers["Authorization"] != f"Bearer token-{self.server.tokens}":
            return 401, {"code": 401, "message": "Unauthorized"}
        if path == "/org-unit/projects":
            return 200, {"projects": self.server.projects}
        if path in ("/workloads/trainings", "/workloads/distributed"):
            return 202, {"workloadId": "w-1", "name": body["name"], "actualPhase": "Creating"}
        if path == "/workloads/w-1":
            return self.server.odd_status, self.server.odd or {
                "id": "w-1",
                "phase": self.server.phase,
                "phaseMessage": self.server.message,
            }
        if path.endswith("/w-1/suspend"):
            return 202, b""
        return 404, {"code": 404, "message": "Not Found"}


@pytest.fixture
def runai(monkeypatch: pytest.MonkeyPatch) -> Iterator[RunAi]:
    server = RunAi()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    for name in ("RUNAI_APP_ID", "RUNAI_APP_SECRET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RUNAI_BASE_URL", server.address)
    monkeypatch.setenv("RUNAI_CLIENT_ID", "me")
    monkeypatch.setenv("RUNAI_CLIENT_SECRET", SECRET)
    _token.cache_clear()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(("nodes", "kind"), [(1, "trainings"), (2, "distributed")])
def test_a_run_is_submitted_asked_about_and_cancelled(
    store: ArtifactStore, tmp_path: Path, runai: RunAi, nodes: int, kind: str
) -> None:
    info = submit(store, profile_of(tmp_path, nodes=nodes))
    assert info.job == f"{runai.address}/api/v1/workloads/{kind}/w-1"
    *_, (method, path, body) = runai.asked
    assert (method, path, body["projectId"], body["clusterId"]) == ("POST", f"/workloads/{kind}", "7", "c1")
    script = RunFolder(store, info.id).path / "dgxcloud.sh"
    assert body["spec"]["command"] == f"/bin/bash {script}"
    assert subprocess.run(["bash", "-n", str(script)]).returncode == 0
    assert DGXCloudExecutor().status(info.job).state is JobState.RUNNING
    launching.cancel(store, info)
    assert runai.asked[-1] == ("POST", f"/workloads/{kind}/w-1/suspend", None)
    for phase, state in (
        ("Pending", JobState.PENDING),
        ("Completed", JobState.DONE),
        ("Failed", JobState.FAILED),
        ("Stopped", JobState.CANCELLED),
    ):
        runai.phase = phase
        assert DGXCloudExecutor().status(info.job).state is state
    launching.cancel(store, info)
    assert runai.asked[-1][1] == "/workloads/w-1", "what is over is not stopped again"
    assert DGXCloudExecutor().status(info.job.replace("w-1", "w-2")).state is JobState.LOST
    assert runai.tokens == 1
    written = [file for file in RunFolder(store, info.id).path.rglob("*") if file.is_file()]
    assert written and [file for file in written if SECRET in file.read_text(errors="replace")] == []


@pytest.mark.parametrize("answer", [b"[1]", b'"x"', b"null", b"[" * 100_000, b"\xff"])
def test_an_answer_that_is_none_of_run_ais_is_refused(runai: RunAi, answer: bytes) -> None:
    runai.odd = answer
    with pytest.raises(RequestError, match="not Run:ai's API"):
        DGXCloudExecutor().status(f"{runai.address}/api/v1/workloads/trainings/w-1")


def test_a_phase_that_is_not_known_is_no_end_and_its_message_is_told_in_one_line(runai: RunAi) -> None:
    runai.phase, runai.message = "Hibernating", "no room\nin any pool"
    found = DGXCloudExecutor().status(f"{runai.address}/api/v1/workloads/trainings/w-1")
    assert (found.state, found.detail) == (JobState.RUNNING, "hibernating, no room")


@pytest.mark.parametrize("ending", ["", "/", "/api/v1", "/api/v1/"])
def test_the_address_may_be_written_with_the_apis_own_path(
    runai: RunAi, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    monkeypatch.setenv("RUNAI_BASE_URL", f"{runai.address}{ending}")
    assert Account.of_environment().base == f"{runai.address}/api/v1"


@pytest.mark.parametrize(
    ("variables", "fields"),
    [
        ({"RUNAI_APP_ID": "app"}, {"clientId": "me", "clientSecret": SECRET}),
        ({"RUNAI_APP_ID": "app", "RUNAI_APP_SECRET": "x"}, {"clientId": "me", "clientSecret": SECRET}),
        (
            {"RUNAI_APP_ID": "app", "RUNAI_APP_SECRET": "x", "RUNAI_CLIENT_ID": ""},
            {"appId": "app", "appSecret": "x"},
        ),
    ],
)
def test_an_access_key_comes_before_an_applications(
    runai: RunAi, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], fields: dict[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    grant = dict(Account.of_environment().grant)
    assert {name: value for name, value in grant.items() if name != "grantType"} == fields


def test_half_of_an_applications_key_is_not_taken_for_one(runai: RunAi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNAI_CLIENT_ID", "")
    monkeypatch.setenv("RUNAI_APP_ID", "app")
    with pytest.raises(RequestError, match="RUNAI_CLIENT_ID is not set"):
        Account.of_environment()


def test_the_key_of_an_application_that_is_not_taken_is_named(runai: RunAi, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RUNAI_CLIENT_ID": "", "RUNAI_APP_ID": "app", "RUNAI_APP_SECRET": "wrong-but-long"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RequestError, match="does not take the access key") as caught:
        Account.of_environment().read("/org-unit/projects")
    assert caught.value.where == "RUNAI_APP_ID, RUNAI_APP_SECRET"


def test_an_address_is_told_without_the_password_in_it() -> None:
    account = Account("http://me:hunter22@127.0.0.1:9/api/v1", (("grantType", "client_credentials"),))
    with pytest.raises(RetryableError) as caught:
        account.read("/workloads/w-1")
    assert caught.value.where == "http://127.0.0.1:9"


def test_a_long_refusal_is_cut(runai: RunAi) -> None:
    runai.odd, runai.odd_status = b"x" * 1000, HTTPStatus.CONFLICT
    with pytest.raises(RequestError, match=r"refused: x{300} \(HTTP 409\)"):
        DGXCloudExecutor().status(f"{runai.address}/api/v1/workloads/trainings/w-1")


def test_a_token_that_ran_out_is_asked_for_again(store: ArtifactStore, tmp_path: Path, runai: RunAi) -> None:
    info = submit(store, profile_of(tmp_path))
    runai.tokens += 1
    assert DGXCloudExecutor().status(info.job).state is JobState.RUNNING


def test_the_key_of_an_application_is_taken_too(
    store: ArtifactStore, tmp_path: Path, runai: RunAi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RUNAI_CLIENT_ID")
    monkeypatch.setenv("RUNAI_APP_ID", "app")
    monkeypatch.setenv("RUNAI_APP_SECRET", SECRET)
    assert submit(store, profile_of(tmp_path)).job.endswith("/w-1")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RUNAI_CLIENT_SECRET": "wrong-but-long-enough"}, "does not take the access key"),
        ({"RUNAI_CLIENT_ID": ""}, "RUNAI_CLIENT_ID is not set"),
        ({"RUNAI_BASE_URL": ""}, "RUNAI_BASE_URL is not set"),
        ({"RUNAI_BASE_URL": "http://run.example.com"}, "is no https address"),
        ({"project": "beta"}, "no project 'beta'"),
        ({"down": HTTPStatus.FORBIDDEN}, "access key"),
        ({"down": HTTPStatus.UNAUTHORIZED}, "access key"),
        ({"down": HTTPStatus.TEMPORARY_REDIRECT}, "sends elsewhere"),
        ({"down": HTTPStatus.FOUND}, "sends elsewhere"),
        ({"down": HTTPStatus.NOT_FOUND}, r"Run:ai refused: no quota left \(HTTP 404\)"),
    ],
)
def test_what_run_ai_does_not_take_is_one_error_and_a_failed_run(
    store: ArtifactStore,
    tmp_path: Path,
    runai: RunAi,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, Any],
    message: str,
) -> None:
    runai.down = change.pop("down", runai.down)
    profile = profile_of(tmp_path, project_name=change.pop("project", "alignment"))
    for name, value in change.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RequestError, match=message) as caught:
        submit(store, profile)
    assert get_run(store, "latest").status == "failed"
    assert not [path for _, path, _ in runai.asked if path.startswith(("/workloads", "/elsewhere"))]
    assert "wrong-but-long-enough" not in str(caught.value) and SECRET not in str(caught.value)


def test_a_project_on_several_clusters_wants_the_clusters_id(
    store: ArtifactStore, tmp_path: Path, runai: RunAi
) -> None:
    runai.projects.append({"name": "alignment", "id": "8", "clusterId": "c2"})
    with pytest.raises(RequestError, match="several clusters") as caught:
        submit(store, profile_of(tmp_path))
    assert caught.value.hints == ('cluster_id = "c1"',)
    submit(store, profile_of(tmp_path, cluster_id="c2"))
    assert runai.asked[-1][2]["projectId"] == "8"
    with pytest.raises(RequestError, match="no project 'alignment' for this access key on cluster c3") as caught:
        submit(store, profile_of(tmp_path, cluster_id="c3"))
    assert (caught.value.where, caught.value.expected, caught.value.found) == ("cluster_id", "c1, c2", "c3")


def test_a_server_at_fault_or_gone_may_be_asked_again(store: ArtifactStore, tmp_path: Path, runai: RunAi) -> None:
    job = submit(store, profile_of(tmp_path)).job
    for runai.down in (HTTPStatus.INTERNAL_SERVER_ERROR, HTTPStatus.SERVICE_UNAVAILABLE):
        with pytest.raises(RetryableError, match="does not answer") as caught:
            DGXCloudExecutor().status(job)
    assert caught.value.found == "no quota left (HTTP 503)"
    runai.shutdown()
    runai.server_close()
    with pytest.raises(RetryableError, match="does not answer") as caught:
        DGXCloudExecutor().status(job)
    assert "refused" in str(caught.value.found)


def test_too_many_requests_for_a_token_may_be_asked_again(store: ArtifactStore, tmp_path: Path, runai: RunAi) -> None:
    runai.down = HTTPStatus.TOO_MANY_REQUESTS
    with pytest.raises(RetryableError, match="does not answer"):
        submit(store, profile_of(tmp_path))


def test_a_key_is_sent_nowhere_but_to_its_own_address(runai: RunAi) -> None:
    with pytest.raises(RequestError, match="another Run:ai") as caught:
        DGXCloudExecutor().status("https://evil.example.com/api/v1/workloads/trainings/w-1")
    assert runai.asked == [] and caught.value.expected == f"{runai.address}/api/v1"
