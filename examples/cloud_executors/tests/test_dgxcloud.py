"""The dgxcloud executor: the kit's jobs through a server that plays Run:ai, and the workload held to Run:ai's types."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cloud_executors.dgxcloud import STATES, DGXCloudExecutor, DGXCloudProfile, job_script, workload_request
from cloud_executors.runai_api import Account, _token
from run_ai import SECRET, RunAi, serving

from nemotron_steps.config.profiles import Profile, load_environment
from nemotron_steps.errors import ConfigError, RequestError, RetryableError
from nemotron_steps.runs.executors.base import JobState, Launch, profile_model
from nemotron_steps.testing import executor_conformance

LaunchOf = Callable[[Profile], Launch]
KEYS = {"project_name": "alignment", "container_image": "nvcr.io/acme/nemotron-steps:cuda"}
ROOT = {"path": "/", "claimName": "lustre"}
WHOLE: dict[str, Any] = {
    "nodes": 3,
    "gpus_per_node": 8,
    "env_vars": {"MODE": "x"},
    "secret_vars": {"HF_TOKEN": {"name": "tokens", "key": "hf"}},
    "setup_lines": ["ulimit -n 65536"],
    "image_pull_secrets": ["ngc"],
    "custom_spec": {"nodePools": ["h100"], "priorityClass": "high", "backoffLimit": 1},
}


def profile(**keys: Any) -> DGXCloudProfile:
    return DGXCloudProfile.model_validate({"executor": "dgxcloud", **KEYS, "pvcs": [ROOT], **keys})


@pytest.fixture(scope="module")
def account() -> Iterator[RunAi]:
    """Run:ai, and the environment of somebody with an access key."""
    with serving() as server, pytest.MonkeyPatch.context() as patch:
        for name in ("RUNAI_APP_ID", "RUNAI_APP_SECRET"):
            patch.delenv(name, raising=False)
        patch.setenv("RUNAI_BASE_URL", server.address)
        patch.setenv("RUNAI_CLIENT_ID", "me")
        patch.setenv("RUNAI_CLIENT_SECRET", SECRET)
        yield server


@pytest.fixture
def runai(account: RunAi, monkeypatch: pytest.MonkeyPatch) -> RunAi:
    """The same without what an earlier test made of it."""
    account.answers, account.projects = {}, account.projects[:1]
    account.asked.clear()
    _token.cache_clear()
    return account


TestDGXCloud = pytest.mark.usefixtures("account")(executor_conformance("dgxcloud", profile={**KEYS, "pvcs": [ROOT]}))


def test_a_profile_becomes_a_workload(launch_of: LaunchOf) -> None:
    launch = launch_of(profile(**WHOLE))
    request = workload_request(launch)
    assert request["masterSpecSameAsWorker"] is True
    assert request["spec"] == {
        "image": KEYS["container_image"],
        "imagePullPolicy": "IfNotPresent",
        "imagePullSecrets": [{"name": "ngc"}],
        "command": f"/bin/bash {launch.folder}/dgxcloud.sh",
        "compute": {"largeShmRequest": True, "gpuDevicesRequest": 8},
        "storage": {"pvc": [{**ROOT, "existingPvc": True, "readOnly": False}]},
        "environmentVariables": [
            {"name": "MODE", "value": "x"},
            {"name": "STEPS_JOB", "value": "r1"},
            {"name": "HF_TOKEN", "secret": {"name": "tokens", "key": "hf"}},
        ],
        "restartPolicy": "Never",
        "backoffLimit": 1,  # custom_spec goes first
        "terminationGracePeriodSeconds": 120,
        "nodePools": ["h100"],
        "priorityClass": "high",
        "distributedFramework": "PyTorch",
        "numWorkers": 2,  # and the master are three nodes
    }
    single = workload_request(replace(launch_of(profile()), force_squash=True))
    assert single["spec"]["imagePullPolicy"] == "Always" and "masterSpecSameAsWorker" not in single
    assert (single["spec"]["compute"], single["spec"]["backoffLimit"]) == ({"largeShmRequest": True}, 0)
    assert not {"distributedFramework", "numWorkers"} & set(single["spec"])


def test_run_ai_takes_the_workload(launch_of: LaunchOf, sdk: Callable[..., Any]) -> None:
    ids = {"projectId": "7", "clusterId": "71f69d83-ba66-4822-adf5-55ce55efd210"}
    requests = [workload_request(launch_of(profile(**keys))) | ids for keys in (WHOLE, {})]
    # The generated types leave unknown keys out: what comes back whole was known.
    answer = sdk(
        "from runai.models import DistributedCreationRequest, Phase, TrainingCreationRequest\n"
        "kinds = (DistributedCreationRequest, TrainingCreationRequest)\n"
        "made = [kind.from_dict(body).to_dict() for kind, body in zip(kinds, request)]\n"
        "answer = {'made': made, 'phases': [phase.value for phase in Phase]}",
        "runai",
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
def test_each_pod_does_its_part(launch_of: LaunchOf, tmp_path: Path, rank: str, said: str, addresses: str) -> None:
    """Run with programs that say how they were called: `ray start` on every node, the run on the first alone.

    A pod may have addresses of both kinds.
    """
    launch = launch_of(profile(nodes=2))
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, line in {
        "ray": '[ "$3" = --head ] && echo head || echo worker; echo "${RAY_ADDRESS:-$head} ${WORLD_SIZE:-none}"',
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


@pytest.mark.parametrize(
    ("keys", "message", "hint"),
    [
        ({"pvcs": []}, "would not see the home", "pvcs = [{ path = "),
        ({"pvcs": [{**ROOT, "path": "/elsewhere"}]}, "would not see the home", "claimName"),
        ({"pvcs": [{**ROOT, "readOnly": True}]}, "could not write to it", "claimName"),
        ({"pvcs": [{**ROOT, "path": "/data"}, ROOT]}, None, None),
        (
            {"env_vars": {"HF_TOKEN": f"hf_{SECRET}"}},
            "these are secrets",
            'secret_vars = { HF_TOKEN = { name = "SECRET", key = "HF_TOKEN" } }',
        ),
    ],
)
def test_what_would_not_work_is_refused_before_anybody_is_asked(
    launch_of: LaunchOf, runai: RunAi, keys: dict[str, Any], message: str | None, hint: str | None
) -> None:
    launch = launch_of(profile(nodes=2, **keys))
    if message is None:
        assert DGXCloudExecutor().submit(launch)
        return
    with pytest.raises(RequestError, match=message) as caught:
        DGXCloudExecutor().submit(launch)
    assert hint in caught.value.hints[0] and SECRET not in str(caught.value) and runai.asked == []


def test_a_key_of_nemo_runs_says_where_its_value_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [*(f'{key} = "{value}"' for key, value in KEYS.items()), f'app_secret = "{SECRET}"']
    (tmp_path / "env.toml").write_text("\n".join(["[cloud]", 'executor = "dgxcloud"', *lines]))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"'app_secret' is not a key .* RUNAI_APP_SECRET") as caught:
        load_environment(tmp_path).profile("cloud", profile_model)
    assert SECRET not in str(caught.value) and caught.value.where == f"{tmp_path}/env.toml:1"


@pytest.mark.parametrize(
    ("variables", "base", "fields"),
    [
        ({}, "", {"clientId": "me", "clientSecret": SECRET}),
        ({"RUNAI_BASE_URL": "+/"}, "", {}),
        ({"RUNAI_BASE_URL": "+/api/v1"}, "", {}),
        ({"RUNAI_BASE_URL": "+/api/v1/"}, "", {}),
        ({"RUNAI_APP_ID": "app", "RUNAI_APP_SECRET": "x"}, "", {"clientId": "me", "clientSecret": SECRET}),
        ({"RUNAI_APP_ID": "app"}, "", {"clientId": "me", "clientSecret": SECRET}),
        (
            {"RUNAI_APP_ID": "app", "RUNAI_APP_SECRET": "x", "RUNAI_CLIENT_ID": ""},
            "",
            {"appId": "app", "appSecret": "x"},
        ),
    ],
)
def test_the_account_is_the_environments(
    runai: RunAi, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], base: str, fields: dict[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value.replace("+", runai.address))
    found = Account.of_environment()
    assert found.base == f"{runai.address}/api/v1" and fields.items() <= dict(found.grant).items()


APP = {"RUNAI_CLIENT_ID": "", "RUNAI_APP_ID": "app"}
SAID = {"message": "no quota left"}


@pytest.mark.parametrize(
    ("variables", "answer", "error", "message"),
    [
        ({"RUNAI_CLIENT_SECRET": "wrong-but-long"}, None, RequestError, "access key\n.*RUNAI_CLIENT_ID, RUNAI_CLIENT_"),
        ({**APP, "RUNAI_APP_SECRET": "wrong-but-long"}, None, RequestError, "access key\n.*RUNAI_APP_ID, RUNAI_APP_"),
        ({"RUNAI_CLIENT_ID": ""}, None, RequestError, "RUNAI_CLIENT_ID is not set"),
        (APP, None, RequestError, "RUNAI_CLIENT_ID is not set"),
        ({"RUNAI_BASE_URL": ""}, None, RequestError, "RUNAI_BASE_URL is not set"),
        ({"RUNAI_BASE_URL": "http://run.example.com"}, None, RequestError, "is no https address"),
        ({"RUNAI_BASE_URL": "http://me:wrong-but-long@127.0.0.1:9"}, None, RetryableError, "--> http://127.0.0.1:9\n"),
        ({}, (403, SAID), RequestError, "access key"),
        ({}, (401, SAID), RequestError, "access key"),
        ({}, (307, SAID), RequestError, "sends elsewhere"),
        ({}, (302, SAID), RequestError, "sends elsewhere"),
        ({}, (404, SAID), RequestError, r"refused: no quota left \(HTTP 404\)"),
        ({}, (409, b"x" * 1000), RequestError, r"refused: x{300} \(HTTP 409\)"),
        ({}, (429, SAID), RetryableError, "does not answer"),
        ({}, (500, SAID), RetryableError, "does not answer"),
        ({}, (503, SAID), RetryableError, r"does not answer[\s\S]*no quota left \(HTTP 503\)"),
        ({}, (200, b"[1]"), RequestError, "gave no token"),
        ({}, (200, b"\xff"), RequestError, "not Run:ai's API"),
    ],
)
def test_what_run_ai_does_not_take_is_one_error(
    launch_of: LaunchOf,
    runai: RunAi,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    answer: tuple[int, Any] | None,
    error: type[Exception],
    message: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if answer is not None:
        runai.answers[""] = answer
    with pytest.raises(error, match=message) as caught:
        DGXCloudExecutor().submit(launch_of(profile()))
    assert "wrong-but-long" not in str(caught.value) and SECRET not in str(caught.value) and runai.asked == []


def test_a_workload_is_made_asked_about_and_suspended(launch_of: LaunchOf, runai: RunAi) -> None:
    launch = launch_of(profile(nodes=2))
    job = DGXCloudExecutor().submit(launch)
    *_, (method, path, body) = runai.asked
    base, _, name = job.rpartition("/")
    assert (method, path, base) == ("POST", "/workloads/distributed", f"{runai.address}/api/v1/workloads/distributed")
    assert (body["projectId"], body["clusterId"]) == ("7", "c1")
    assert subprocess.run(["bash", "-n", str(launch.folder / "dgxcloud.sh")]).returncode == 0
    tokens = runai.tokens
    assert DGXCloudExecutor().status(job).state is JobState.RUNNING and runai.tokens == tokens
    runai.tokens += 1  # the one that was given ran out
    assert DGXCloudExecutor().status(job).state is JobState.RUNNING
    for _ in range(2):  # what is over is not stopped again
        DGXCloudExecutor().cancel(job)
    stops = [(method, path) for method, path, _ in runai.asked if path.endswith("suspend")]
    assert stops == [("POST", f"/workloads/distributed/{name}/suspend")]
    assert DGXCloudExecutor().status(job).state is JobState.CANCELLED
    assert DGXCloudExecutor().status(job + "0").state is JobState.LOST


@pytest.mark.parametrize(
    ("phases", "state"),
    [
        ("Creating Initializing Pending Resuming", JobState.PENDING),
        ("Running Updating Degraded Stopping Terminating Unknown Hibernating", JobState.RUNNING),
        ("Stopped Deleting", JobState.CANCELLED),
        ("Completed", JobState.DONE),
        ("Failed", JobState.FAILED),
    ],
)
def test_a_workload_is_over_in_the_phases_in_which_nothing_more_happens(
    runai: RunAi, phases: str, state: JobState
) -> None:
    for phase in phases.split():
        runai.answers["/workloads/w-0"] = (200, {"phase": phase, "phaseMessage": "no room\nin any pool"})
        found = DGXCloudExecutor().status(f"{runai.address}/api/v1/workloads/trainings/w-0")
        assert (found.state, found.detail) == (state, f"{phase.lower()}, no room")


@pytest.mark.parametrize("answer", [b"[1]", b'"x"', b"null", b"[" * 100_000, b"\xff"])
def test_an_answer_that_is_none_of_run_ais_is_refused(runai: RunAi, answer: bytes) -> None:
    runai.answers["/workloads/w-0"] = (200, answer)
    with pytest.raises(RequestError, match="not Run:ai's API"):
        DGXCloudExecutor().status(f"{runai.address}/api/v1/workloads/trainings/w-0")


def test_a_key_is_sent_nowhere_but_to_its_own_address(runai: RunAi) -> None:
    with pytest.raises(RequestError, match="another Run:ai") as caught:
        DGXCloudExecutor().status("https://evil.example.com/api/v1/workloads/trainings/w-1")
    assert runai.asked == [] and caught.value.expected == f"{runai.address}/api/v1"


def test_a_project_on_several_clusters_wants_the_clusters_id(launch_of: LaunchOf, runai: RunAi) -> None:
    runai.projects.append({"name": "alignment", "id": "8", "clusterId": "c2"})
    with pytest.raises(RequestError, match="several clusters") as caught:
        DGXCloudExecutor().submit(launch_of(profile(nodes=2)))
    assert caught.value.hints == ('cluster_id = "c1"',)
    DGXCloudExecutor().submit(launch_of(profile(nodes=2, cluster_id="c2")))
    assert runai.asked[-1][2]["projectId"] == "8"
    with pytest.raises(RequestError, match="no project 'alignment' for this access key on cluster c3") as caught:
        DGXCloudExecutor().submit(launch_of(profile(cluster_id="c3")))
    assert (caught.value.where, caught.value.expected, caught.value.found) == ("cluster_id", "c1, c2", "c3")
    with pytest.raises(RequestError, match="no project 'beta'"):
        DGXCloudExecutor().submit(launch_of(profile(project_name="beta")))
