"""The lepton executor: the job it compiles to, held to Lepton's own types."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.errors import RequestError, RetryableError
from nemotron_steps.runs.executors.base import JobState, Launch
from nemotron_steps.runs.executors.lepton import STATES, LeptonExecutor, LeptonProfile, job_request
from nemotron_steps.runs.run_folder import get_run
from tests.runs.executors.jobs import submit
from tests.runs.executors.sdks import asked, needs_sdks


def profile_of(mounted: Path, **keys: Any) -> LeptonProfile:
    values = {
        "executor": "lepton",
        "container_image": "nemotron-steps:cuda",
        "resource_shape": "gpu.8xh100-80gb",
        "mounts": [{"path": "/", "mount_path": str(mounted), "from": "node-nfs:lustre"}],
    }
    return LeptonProfile.model_validate({**values, **keys})


def a_request(tmp_path: Path, **keys: Any) -> dict[str, Any]:
    words = ("--resume", "r1", "--home", str(tmp_path / "home"))
    profile = profile_of(tmp_path, **keys)
    return job_request(Launch("r1", tmp_path / "home/runs/r1", words, profile, tmp_path, {"STEPS_JOB": "r1"}))


WHOLE: dict[str, Any] = {
    "nodes": 2,
    "env_vars": {"MODE": "x"},
    "secret_vars": {"HF_TOKEN": "my-token"},
    "setup_lines": ["ulimit -n 65536"],
    "image_pull_secrets": ["ngc"],
}


def test_a_profile_becomes_a_job(tmp_path: Path) -> None:
    spec = a_request(tmp_path, **WHOLE)["spec"]
    assert (spec["completions"], spec["parallelism"], spec["intra_job_communication"]) == (2, 2, True)
    assert spec["envs"] == [
        {"name": "MODE", "value": "x"},
        {"name": "STEPS_JOB", "value": "r1"},
        {"name": "HF_TOKEN", "value_from": {"secret_name_ref": "my-token"}},
    ]
    shell, flag, script = spec["container"]["command"]
    assert (shell, flag) == ("bash", "-c") and script.startswith("ulimit -n 65536\n")
    assert f"exec steps run --resume r1 --home {tmp_path}/home" in script and "ray start" in script
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    assert (spec["shared_memory_size"], spec["image_pull_secrets"]) == (65536, ["ngc"])
    assert a_request(tmp_path)["spec"]["intra_job_communication"] is False
    single = a_request(tmp_path)["spec"]["container"]["command"][2]
    assert "ray" not in single and single.startswith(f"[ ! -d {tmp_path} ] || cd {tmp_path}\n")


def test_what_a_job_would_not_see_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").touch()
    launch = Launch("r1", tmp_path / "home/runs/r1", (), profile_of(tmp_path), tmp_path, {})
    assert job_request(replace(launch, paths=(tmp_path / "rows.jsonl",)))
    with pytest.raises(RequestError, match="would not see what the run reads") as caught:
        job_request(replace(launch, paths=(tmp_path / "rows.jsonl", Path("/elsewhere/model"))))
    assert caught.value.found == "/elsewhere/model"


@needs_sdks
def test_lepton_takes_the_job(tmp_path: Path) -> None:
    request = a_request(tmp_path, **WHOLE)
    answer = asked(
        "from leptonai.api.v2.job_validation import validate_job_create\n"
        "from leptonai.api.v2.types.job import LeptonJob, LeptonJobState, LeptonJobUserSpec\n"
        "job = LeptonJob.model_validate(request)\n"
        "validate_job_create(job)\n"
        "answer = {'mounted': job.spec.mounts[0].mount_path, 'parallelism': job.spec.parallelism,\n"
        "          'fields': list(LeptonJobUserSpec.model_fields), 'states': [s.value for s in LeptonJobState]}",
        request,
    )
    assert (answer["parallelism"], answer["mounted"]) == (2, str(tmp_path))
    assert set(request["spec"]) <= set(answer["fields"])
    assert set(STATES) == set(answer["states"])


def test_a_secret_goes_through_the_workspace_alone(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="these are secrets") as caught:
        a_request(tmp_path, env_vars={"HF_TOKEN": "hf_qwertyuiop"})
    assert caught.value.hints[1] == 'secret_vars = { HF_TOKEN = "HF_TOKEN" }'
    assert "qwertyuiop" not in str(caught.value)


@pytest.fixture
def workspace(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A stand-in for Lepton's SDK with one node group; `state` is what its one job is in, `asked` what was asked."""

    class Error(RuntimeError):
        pass

    told = SimpleNamespace(state="Running", asked=[], error=None, ServerError=Error)

    def answered(name: str, answer: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            if told.error is not None:
                raise told.error
            told.asked.append((name, arguments, options))
            return answer()

        return call

    def job() -> Any:
        state = None if told.state is None else SimpleNamespace(value=told.state)
        return SimpleNamespace(status=SimpleNamespace(state=state), metadata=SimpleNamespace(id_="job-1"))

    group = SimpleNamespace(metadata=SimpleNamespace(name="h100", id_="h100-7f"))
    client = SimpleNamespace(
        job=SimpleNamespace(create=answered("create", job), get=answered("get", job), update=answered("update", job)),
        nodegroup=SimpleNamespace(list_all=answered("groups", lambda: [group])),
    )
    modules = {
        "leptonai.api.v2.api_resource": {"ServerError": Error},
        "leptonai.api.v2.client": {"APIClient": lambda: client},
        "leptonai.api.v2.types.job": {"LeptonJob": SimpleNamespace(model_validate=lambda request: request)},
    }
    for name in ("leptonai", "leptonai.api", "leptonai.api.v2", "leptonai.api.v2.types", *modules):
        module = ModuleType(name)
        vars(module).update(modules.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)
    return told


def test_a_job_is_made_in_its_node_group_asked_about_and_stopped_while_it_works(
    store: ArtifactStore, tmp_path: Path, workspace: SimpleNamespace
) -> None:
    assert submit(store, profile_of(tmp_path, node_group="h100")).job == "job-1"
    name, (request,), _ = workspace.asked[-1]
    assert (name, request["spec"]["affinity"]) == ("create", {"allowed_dedicated_node_groups": ["h100-7f"]})
    LeptonExecutor().cancel("job-1")
    assert workspace.asked[-1] == ("update", ("job-1",), {"spec": {"spec": {"stopped": True}}})
    for state, ours in (("Queueing", JobState.PENDING), (None, JobState.RUNNING), ("Hibernated", JobState.LOST)):
        workspace.state = state
        assert LeptonExecutor().status("job-1").state is ours
    workspace.state = "Completed"
    LeptonExecutor().cancel("job-1")
    assert workspace.asked[-1][0] == "get", "what is over is not stopped again"


def test_a_node_group_that_is_not_there_is_refused_and_silence_is_retryable(
    store: ArtifactStore, tmp_path: Path, workspace: SimpleNamespace
) -> None:
    with pytest.raises(RequestError, match="no node group 'b200'") as caught:
        submit(store, profile_of(tmp_path, node_group="b200"))
    assert caught.value.expected == "h100" and get_run(store, "latest").status == "failed"
    for error in (workspace.ServerError("HTTP 502"), ConnectionError("refused")):
        workspace.error = error
        with pytest.raises(RetryableError, match="Lepton does not answer") as silent:
            LeptonExecutor().status("job-1")
        assert silent.value.found == str(error)
    workspace.error = ValueError("the workspace is another one")
    with pytest.raises(RequestError, match="Lepton refused"):
        LeptonExecutor().cancel("job-1")
    unknown: Any = RuntimeError("Client error during API call: 404")
    unknown.response = SimpleNamespace(status_code=404)
    workspace.error = unknown
    assert LeptonExecutor().status("job-1").state is JobState.LOST
    unknown.response.status_code = 401  # a refusal to answer says nothing of the job
    with pytest.raises(RequestError, match="Lepton refused"):
        LeptonExecutor().status("job-1")
