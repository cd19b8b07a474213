"""The DGX Cloud executor: a run as a training workload of NVIDIA Run:ai, DGX Cloud's scheduler, by its REST API.

The home must be on a persistent volume that the workload mounts (`pvcs`), at the path it has here: the job's script and
what it prints are in the run's folder. With several nodes the first one runs `steps run`, and Ray over all of them is
what `cluster.backend=ray` joins.
"""

from __future__ import annotations

import re
import secrets
import shlex
import urllib.parse
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictStr, model_validator

from cloud_executors.runai_api import ADDRESS, Account
from nemotron_steps.config.profiles import Profile, VariableName
from nemotron_steps.errors import RequestError
from nemotron_steps.runs.executors.base import JobState, JobStatus, Launch

SCRIPT = "dgxcloud.sh"
_GRACE_S = 120
"""How long a workload that is stopped may take to save what it has; Kubernetes' own default is 30 s."""
_SET_BY_OPERATOR = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Said to every pod of a distributed workload; the run's own processes would take them for theirs."""
STATES = {
    **dict.fromkeys(("Creating", "Initializing", "Pending", "Resuming"), JobState.PENDING),
    # A cluster that Run:ai has lost sight of says Unknown: nothing is known to be over.
    **dict.fromkeys(("Running", "Updating", "Degraded", "Stopping", "Terminating", "Unknown"), JobState.RUNNING),
    **dict.fromkeys(("Stopped", "Deleting"), JobState.CANCELLED),
    "Completed": JobState.DONE,
    "Failed": JobState.FAILED,
}
"""Run:ai's phases of a workload."""
_SAID_ELSEWHERE = {
    "base_url": "the environment has it: RUNAI_BASE_URL",
    **dict.fromkeys(("client_id", "client_secret"), "the environment has it: RUNAI_CLIENT_ID, RUNAI_CLIENT_SECRET"),
    **dict.fromkeys(("app_id", "app_secret"), "the environment has it: RUNAI_APP_ID, RUNAI_APP_SECRET"),
    **dict.fromkeys(
        ("pvc_nemo_run_dir", "kube_apiserver_url", "launched_from_cluster"),
        "nothing is copied: the home is on a volume of `pvcs`, at the path it has here",
    ),
    "distributed_framework": "the job brings up Ray itself",
}
"""Keys of NeMo-Run's executor of that name which this one does not have."""


class _Table(BaseModel):
    """A table inside a profile. Unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class VolumeClaim(_Table):
    """One of `pvcs`, with Run:ai's own names."""

    path: StrictStr
    """Where the workload sees it."""
    claimName: StrictStr
    existingPvc: StrictBool = True
    readOnly: StrictBool = False


class SecretKey(_Table):
    """A value of a Kubernetes secret in the project's namespace."""

    name: StrictStr
    key: StrictStr


class DGXCloudProfile(Profile):
    """Keys of `executor = "dgxcloud"`. The address and the access key are the environment's (see runai_api)."""

    project_name: StrictStr
    """The project to work in."""
    cluster_id: StrictStr | None = None
    """Needed where projects of that name are on several clusters."""
    of_image: ClassVar = ("container_image",)
    container_image: StrictStr | None = None
    """An image of a registry that the cluster reaches."""
    pvcs: tuple[VolumeClaim, ...] = ()
    """One must hold the home."""
    secret_vars: dict[VariableName, SecretKey] = Field(default_factory=dict)
    """Variable → where its value is kept."""
    image_pull_secrets: tuple[StrictStr, ...] = ()
    """Names of the cluster's secrets that the registry asks for."""
    custom_spec: dict[StrictStr, Any] = Field(default_factory=dict)
    """More of a workload's `spec`, as Run:ai has it: nodePools, priorityClass, tolerations. It goes first."""

    @model_validator(mode="before")
    @classmethod
    def _no_keys_of_nemo_runs(cls, values: Any) -> Any:
        given = values if isinstance(values, dict) else {}
        told = [
            f"'{key}' is not a key of executor dgxcloud: {why}" for key, why in _SAID_ELSEWHERE.items() if key in given
        ]
        if told:
            raise ValueError("; ".join(told))
        return values


class DGXCloudExecutor:
    """Jobs are addresses of workloads: `BASE/workloads/KIND/ID`."""

    profile_model = DGXCloudProfile

    def submit(self, launch: Launch) -> str:
        """See Executor."""
        profile = _profile(launch)
        request = workload_request(launch)
        account = Account.of_environment()
        request |= _project(account, profile.project_name, profile.cluster_id)
        # Put there whole: an earlier job of the run's may be reading it.
        written = launch.folder / f"{SCRIPT}.new"
        written.write_text(job_script(launch), encoding="utf-8")
        written.replace(launch.folder / SCRIPT)
        path = f"/workloads/{'trainings' if profile.nodes == 1 else 'distributed'}"
        made = account.ask("POST", path, request)
        if not isinstance(made, dict) or not made.get("workloadId"):
            raise RequestError("Run:ai did not say which workload it made", where=path, expected="workloadId")
        return f"{account.base}{path}/{made['workloadId']}"

    def status(self, job: str) -> JobStatus:
        """See Executor."""
        known = _parts(job)
        if known is None:
            return JobStatus(JobState.LOST, "this is no workload of Run:ai's")
        account, _, number = known
        # Every kind is known there too, and has its `phase`; under its own kind it would be `actualPhase`.
        found = account.read(f"/workloads/{number}", missing={})
        if not found:
            return JobStatus(JobState.LOST, "Run:ai does not know the workload")
        phase = str(found.get("phase", "Unknown"))
        said = str(found.get("phaseMessage") or "")
        detail = phase.lower() + (f", {said.splitlines()[0]}" if said else "")
        return JobStatus(STATES.get(phase, JobState.RUNNING), detail)

    def cancel(self, job: str) -> None:
        """See Executor."""
        known = _parts(job)
        if known is not None and not self.status(job).state.over:
            account, kind, number = known
            account.ask("POST", f"/workloads/{kind}/{number}/suspend")


def workload_request(launch: Launch) -> dict[str, Any]:
    """The body that makes the workload, but for the ids of project and cluster.

    RequestError if it would not see the home, or hand over a secret in the clear.
    """
    profile = _profile(launch)
    if not any(launch.home.is_relative_to(claim.path) and not claim.readOnly for claim in profile.pvcs):
        raise RequestError(
            "the workload would not see the home, or could not write to it",
            where="pvcs",
            expected=f"a path that holds {launch.home}",
            found=", ".join(claim.path for claim in profile.pvcs) or "none",
            hints=(f'pvcs = [{{ path = "{launch.home}", claimName = "NAME" }}]',),
        )
    if launch.secret_variables:
        first = launch.secret_variables[0]
        raise RequestError(
            "Run:ai shows the variables of a workload, and these are secrets",
            where="env_vars",
            found=", ".join(launch.secret_variables),
            hints=(f'secret_vars = {{ {first} = {{ name = "SECRET", key = "{first}" }} }}',),
        )
    plain = ({"name": name, "value": value} for name, value in launch.variables.items())
    kept = ({"name": name, "secret": of.model_dump()} for name, of in profile.secret_vars.items())
    compute: dict[str, Any] = {"largeShmRequest": True}  # workers exchange tensors through it
    if profile.gpus_per_node:
        compute["gpuDevicesRequest"] = profile.gpus_per_node
    spec: dict[str, Any] = {
        "image": profile.container_image,
        "imagePullPolicy": "Always" if launch.force_squash else "IfNotPresent",
        "imagePullSecrets": [{"name": name} for name in profile.image_pull_secrets],
        # One word after the other, as Run:ai splits them; it takes no more than some thousand characters.
        "command": f"/bin/bash {shlex.quote(str(launch.folder / SCRIPT))}",
        "compute": compute,
        "storage": {"pvc": [claim.model_dump() for claim in profile.pvcs]},
        "environmentVariables": [*plain, *kept],
        # A run that failed failed: Run:ai's own default is to start it six times more.
        "restartPolicy": "Never",
        "backoffLimit": 0,
        "terminationGracePeriodSeconds": _GRACE_S,
        **profile.custom_spec,
    }
    request: dict[str, Any] = {"name": f"steps-{secrets.token_hex(6)}", "spec": spec}
    if profile.nodes > 1:
        spec |= {"distributedFramework": "PyTorch", "numWorkers": profile.nodes - 1}
        request["masterSpecSameAsWorker"] = True
    return request


def job_script(launch: Launch) -> str:
    """What every pod runs; its output goes into the run's folder."""
    profile = _profile(launch)
    lines = ["#!/bin/bash"]
    if profile.nodes > 1:
        # The master's own name may not resolve in its pod; of a pod with two kinds of addresses, the IPv4 one.
        own = "hostname -i | tr ' ' '\\n' | grep -m 1 '^[0-9.]\\+$' || hostname -i"
        lines += ['rank="$RANK" head="$MASTER_ADDR"', f'[ "$rank" -ne 0 ] || head=$({own})']
        lines.append(f"unset {' '.join(_SET_BY_OPERATOR)}")
    console = f'{shlex.quote(str(launch.folder))}/"console-$HOSTNAME.txt"'
    lines += [f"echo output: {console}", f"exec >> {console} 2>&1", *profile.setup_lines]
    return "\n".join([*lines, launch.node_script(head='"$head"', rank="$rank"), ""])


def _profile(launch: Launch) -> DGXCloudProfile:
    assert isinstance(launch.profile, DGXCloudProfile)  # profile_model is what the profile was read with
    return launch.profile


def _project(account: Account, name: str, cluster: str | None) -> dict[str, str]:
    """The ids of the project of that name and of its cluster."""
    query = urllib.parse.urlencode({"filterBy": f"name=={name}"})
    projects = account.read(f"/org-unit/projects?{query}").get("projects", [])
    named = [project for project in projects if project.get("name") == name]
    found = [project for project in named if cluster in (None, project.get("clusterId"))]
    if len(found) == 1:
        return {"projectId": str(found[0]["id"]), "clusterId": str(found[0]["clusterId"])}
    clusters = ", ".join(sorted(str(project.get("clusterId")) for project in named))
    if found:
        raise RequestError(
            f"several clusters have a project '{name}'",
            where="project_name",
            found=clusters,
            hints=(f'cluster_id = "{found[0].get("clusterId")}"',),
        )
    raise RequestError(
        f"Run:ai has no project '{name}' for this access key" + (f" on cluster {cluster}" if named else ""),
        where="cluster_id" if named else "project_name",
        expected=clusters or None,
        found=cluster if named else name,
    )


def _parts(job: str) -> tuple[Account, str, str] | None:
    """The account, and kind and id of a workload; None for what names none."""
    found = re.fullmatch(r"(https?://\S+)/workloads/(trainings|distributed)/([\w-]+)", job)
    if found is None:
        return None
    account = Account.of_environment()
    if found[1] != account.base:
        raise RequestError(
            f"the workload is of another Run:ai than {ADDRESS} says",
            expected=account.base,
            found=found[1],
            hints=(f"export {ADDRESS}={found[1]}",),
        )
    return account, found[2], found[3]
