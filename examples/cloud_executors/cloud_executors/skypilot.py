"""The SkyPilot executor: a run on machines that SkyPilot starts in a cloud, and that go when it is done.

The home must be on storage that those machines mount too (`file_mounts`), at the path it has here. With several nodes
the first one runs `steps run`, and Ray over all of them is what `cluster.backend=ray` joins.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from typing import Any

from pydantic import Field, JsonValue, StrictBool, StrictStr

from nemotron_steps.config.profiles import Profile
from nemotron_steps.errors import RequestError, RetryableError, UnsupportedError, first_line
from nemotron_steps.runs.executors.base import JobState, JobStatus, Launch

STATES = {
    **dict.fromkeys(("INIT", "PENDING", "SETTING_UP"), JobState.PENDING),
    "RUNNING": JobState.RUNNING,
    "SUCCEEDED": JobState.DONE,
    **dict.fromkeys(("FAILED", "FAILED_SETUP"), JobState.FAILED),
    "FAILED_DRIVER": JobState.LOST,
    "CANCELLED": JobState.CANCELLED,
}


class SkyPilotProfile(Profile):
    """Keys of `executor = "skypilot"`."""

    cloud: StrictStr | None = None
    """Where, as SkyPilot's `infra` has it: aws, gcp/us-central1, k8s; default: the cheapest."""
    accelerators: StrictStr | None = None
    """Kind of GPU; how many a node has is `gpus_per_node`."""
    container_image: StrictStr | None = None
    """An image that the machines run; none: the machines themselves."""
    use_spot: StrictBool = False
    """Machines that the cloud may take away, for less."""
    file_mounts: dict[StrictStr, StrictStr | dict[StrictStr, JsonValue]] = Field(default_factory=dict)
    """Path on the machines → bucket or volume, as SkyPilot has them. One must hold the home."""


class SkyPilotExecutor:
    """Jobs are `CLUSTER/NUMBER`, of clusters that were started for them."""

    profile_model = SkyPilotProfile

    def submit(self, launch: Launch) -> str:
        """See Executor."""
        request = task_request(launch)
        sky = _sky()
        name = f"steps-{secrets.token_hex(6)}"
        task = _asked(lambda: sky.Task.from_yaml_config(request))
        # The machines go when the job has ended.
        number, _ = _asked(lambda: sky.get(sky.launch(task, cluster_name=name, down=True)))
        return f"{name}/{number}"

    def status(self, job: str) -> JobStatus:
        """See Executor."""
        known = _parts(job)
        if known is None:
            return JobStatus(JobState.LOST, "this is no job of SkyPilot's")
        name, number = known
        sky = _sky()
        try:
            found = _asked(lambda: sky.get(sky.job_status(name, [number])))
        except RequestError as error:
            gone = (sky.exceptions.ClusterDoesNotExist, sky.exceptions.ClusterNotUpError)
            if not isinstance(error.__cause__, gone):  # a refusal to answer says nothing of the job
                raise
            return JobStatus(JobState.LOST, "the machines are gone")
        state = next(iter(found.values()), None)
        if state is None:
            return JobStatus(JobState.LOST, "SkyPilot does not know the job")
        return JobStatus(STATES.get(str(state.value), JobState.LOST), str(state.value).lower())

    def cancel(self, job: str) -> None:
        """See Executor."""
        known = _parts(job)
        if known is not None and not self.status(job).state.over:
            name, number = known
            sky = _sky()
            _asked(lambda: sky.get(sky.cancel(name, job_ids=[number])))


def task_request(launch: Launch) -> dict[str, Any]:
    """The task as SkyPilot's YAML has it. RequestError if its machines would not see the home."""
    profile = launch.profile
    assert isinstance(profile, SkyPilotProfile)  # profile_model is what the profile was read with
    if not any(launch.home.is_relative_to(path) for path in profile.file_mounts):
        raise RequestError(
            "the machines that SkyPilot starts would not see the home",
            where="file_mounts",
            expected=f"a path that holds {launch.home}",
            found=", ".join(profile.file_mounts) or "none",
            hints=(f'file_mounts = {{ "{launch.home}" = {{ name = "BUCKET", mode = "MOUNT" }} }}',),
        )
    secret = {name: launch.variables[name] for name in launch.secret_variables}
    resources: dict[str, Any] = {"use_spot": profile.use_spot}
    if profile.cloud is not None:
        resources["infra"] = profile.cloud
    if profile.accelerators is not None:
        resources["accelerators"] = f"{profile.accelerators}:{profile.gpus_per_node or 1}"
    if profile.container_image is not None:
        resources["image_id"] = f"docker:{profile.container_image}"
    return {
        "name": f"steps-{launch.run_id}",
        "num_nodes": profile.nodes,
        "resources": resources,
        "file_mounts": dict(profile.file_mounts),
        "envs": {name: value for name, value in launch.variables.items() if name not in secret},
        "secrets": secret,
        "setup": "\n".join(profile.setup_lines) or None,
        "run": launch.node_script(head='$(echo "$SKYPILOT_NODE_IPS" | head -n 1)', rank="$SKYPILOT_NODE_RANK"),
    }


def _parts(job: str) -> tuple[str, int] | None:
    """Cluster and number; None for what `submit` would not return: somebody's own cluster is let be."""
    found = re.fullmatch(r"(steps-[0-9a-f]+)/([0-9]+)", job)
    return (found[1], int(found[2])) if found else None


def _sky() -> Any:
    try:
        import sky
    except ImportError as error:
        raise UnsupportedError(
            "the skypilot executor needs SkyPilot",
            found=str(error),
            hints=("pip install 'skypilot>=0.10'", "sky check   # then: which clouds it may use"),
        ) from error
    return sky


def _asked(question: Callable[[], Any]) -> Any:
    """What SkyPilot answers; its refusals as errors of this package."""
    from sky import exceptions

    try:
        return question()
    except (
        exceptions.ResourcesUnavailableError,
        exceptions.ApiServerConnectionError,
        exceptions.ClusterStatusFetchingError,
        OSError,
    ) as error:
        raise RetryableError(
            "SkyPilot has no machine or does not answer", found=first_line(error), hints=("sky check", "sky status")
        ) from error
    except (
        ValueError,
        RuntimeError,
        exceptions.ClusterDoesNotExist,
        exceptions.ClusterNotUpError,
        exceptions.NoCloudAccessError,
    ) as error:
        raise RequestError("SkyPilot refused", found=first_line(error), hints=("sky check",)) from error
