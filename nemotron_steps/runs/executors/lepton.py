"""The Lepton executor: a run as a batch job of NVIDIA DGX Cloud Lepton, through Lepton's own SDK. The home must be on
storage that the job mounts, at the path it has here."""

import secrets
from collections.abc import Callable
from typing import Any, ClassVar

from pydantic import Field, StrictStr

from nemotron_steps.config.profiles import Count, Profile, VariableName
from nemotron_steps.errors import RequestError, RetryableError, UnsupportedError, first_line
from nemotron_steps.runs.executors.base import JobState, JobStatus, Launch

STATES = {
    **dict.fromkeys(("Starting", "Queueing", "Awaiting", "PendingRetry", "Restarting"), JobState.PENDING),
    # UNK is a state that the SDK does not know: nothing is known to be over.
    **dict.fromkeys(("Running", "Stopping", "Terminating", "UNK"), JobState.RUNNING),
    **dict.fromkeys(("Stopped", "Deleting", "Deleted", "Archived"), JobState.CANCELLED),
    "Completed": JobState.DONE,
    "Failed": JobState.FAILED,
}


class LeptonProfile(Profile):
    """Keys of `executor = "lepton"`."""

    of_image: ClassVar = ("container_image",)
    container_image: StrictStr | None = None
    """An image of a registry that Lepton reaches."""
    resource_shape: StrictStr = Field(examples=["gpu.8xh100-80gb"])
    """What a worker has, in Lepton's words: gpu.8xh100-80gb."""
    node_group: StrictStr | None = None
    """The dedicated node group to work in, by its name."""
    mounts: tuple[dict[str, str], ...] = ()
    """Tables with `path`, `mount_path` and `from`, as Lepton has them. One must hold the home."""
    secret_vars: dict[VariableName, StrictStr] = Field(default_factory=dict)
    """Variable → name of a secret that the workspace keeps."""
    image_pull_secrets: tuple[StrictStr, ...] = ()
    """Names of the workspace's secrets that the registry asks for."""
    shared_memory_size: Count = 65536
    """MiB."""


class LeptonExecutor:
    """Jobs are Lepton's job ids. The workspace is the one that `lep login` chose."""

    profile_model = LeptonProfile

    def check(self, launch: Launch) -> None:
        job_request(launch)

    def submit(self, launch: Launch) -> str:
        profile = launch.profile
        assert isinstance(profile, LeptonProfile)  # profile_model is what the profile was read with
        request = job_request(launch)
        client = _client()
        if profile.node_group is not None:
            groups = {group.metadata.name: str(group.metadata.id_) for group in _request(client.nodegroup.list_all)}
            if profile.node_group not in groups:
                raise RequestError(
                    f"the workspace has no node group '{profile.node_group}'",
                    where="node_group",
                    expected=", ".join(sorted(groups)) or None,
                    hints=("lep node list",),
                )
            request["spec"]["affinity"] = {"allowed_dedicated_node_groups": [groups[profile.node_group]]}
        from leptonai.api.v2.types.job import LeptonJob

        made = _request(lambda: client.job.create(LeptonJob.model_validate(request)))
        return str(made.metadata.id_)

    def status(self, job: str) -> JobStatus:
        client = _client()
        try:
            found = _request(lambda: client.job.get(job))
        except RequestError as error:
            answer = getattr(error.__cause__, "response", None)
            if getattr(answer, "status_code", None) != 404:  # a refusal to answer says nothing of the job
                raise
            return JobStatus(JobState.LOST, "the workspace does not know the job")
        state = found.status.state.value if found.status is not None and found.status.state is not None else "UNK"
        return JobStatus(STATES.get(state, JobState.LOST), state.lower())

    def cancel(self, job: str) -> None:
        client = _client()
        if not self.status(job).state.over:
            _request(lambda: client.job.update(job, spec={"spec": {"stopped": True}}))


def job_request(launch: Launch) -> dict[str, Any]:
    """The job as Lepton's API has it. RequestError if it would not see the home, or hand over a secret in the clear."""
    profile = launch.profile
    assert isinstance(profile, LeptonProfile)  # profile_model is what the profile was read with
    mounted = [mount.get("mount_path", "") for mount in profile.mounts]
    home = [] if any(path and launch.home.is_relative_to(path) for path in mounted) else [launch.home]
    if unseen := home or launch.unseen(f"{path}:{path}" for path in mounted if path):
        raise RequestError(
            "the job would not see what the run reads",
            where="mounts",
            expected="a mount_path that holds it, at the path that it has here",
            found=", ".join(str(path) for path in unseen),
            hints=(f'mounts = [{{ path = "/", mount_path = "{unseen[0]}", from = "node-nfs:NAME" }}]',),
        )
    name = next(iter(launch.secret_variables), "")
    launch.refuse_secrets(
        "Lepton", f"lep secret create --name {name} --value ...", f'secret_vars = {{ {name} = "{name}" }}'
    )
    head = '"$LEPTON_JOB_WORKER_PREFIX-0.$LEPTON_SUBDOMAIN"'
    run = launch.node_script(head=head, rank="$LEPTON_JOB_WORKER_INDEX")
    kept = ({"name": name, "value_from": {"secret_name_ref": of}} for name, of in profile.secret_vars.items())
    return {
        "metadata": {"id": f"steps-{secrets.token_hex(6)}"},
        "spec": {
            "resource_shape": profile.resource_shape,
            "container": {
                "image": profile.container_image,
                "command": ["bash", "-c", "\n".join([*profile.setup_lines, run])],
            },
            "shared_memory_size": profile.shared_memory_size,
            "completions": profile.nodes,
            "parallelism": profile.nodes,
            "intra_job_communication": profile.nodes > 1,
            "envs": [*({"name": name, "value": value} for name, value in launch.variables.items()), *kept],
            "mounts": list(profile.mounts),
            "image_pull_secrets": list(profile.image_pull_secrets),
        },
    }


def _client() -> Any:
    try:
        from leptonai.api.v2.client import APIClient
    except ImportError as error:
        hints = ("pip install 'nemotron-steps[lepton]'", "lep login")
        raise UnsupportedError("the lepton executor needs Lepton's SDK", found=str(error), hints=hints) from error
    return _request(APIClient)


def _request(question: Callable[[], Any]) -> Any:
    """What Lepton answers; its refusals and silence as errors of this package."""
    from leptonai.api.v2.api_resource import ServerError

    try:
        return question()
    except (ServerError, OSError) as error:
        hints = ("lep workspace list",)
        raise RetryableError("Lepton does not answer", found=first_line(error), hints=hints) from error
    except (RuntimeError, ValueError) as error:
        raise RequestError("Lepton refused", found=first_line(error), hints=("lep login",)) from error
