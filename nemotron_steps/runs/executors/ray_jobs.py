"""The Ray executor: a run as a job of a Ray cluster that is there already, through Ray's job API. Cluster and
submitter see one file system."""

import secrets
import shlex
import time
from typing import Annotated, Any

from pydantic import Field, StrictStr

from nemotron_steps.config.profiles import Profile
from nemotron_steps.errors import RequestError, RetryableError, StepsError, UnsupportedError, first_line
from nemotron_steps.runs.executors.base import JobState, JobStatus, Launch
from nemotron_steps.waiting import waiting

AGENT_SECONDS = 60
"""How long a cluster that has been started may take until a node can run a job."""
STOP_SECONDS = 120
"""How long a job that is asked to stop may take to save what it has; Ray's own default is 3 s."""

_STATES = {
    "PENDING": JobState.PENDING,
    "RUNNING": JobState.RUNNING,
    "SUCCEEDED": JobState.DONE,
    "FAILED": JobState.FAILED,
    "STOPPED": JobState.CANCELLED,
}


class RayProfile(Profile):
    """Keys of `executor = "ray"`. How many nodes and GPUs there are is the cluster's to say, and `cluster.*` of the
    step what is used of them."""

    ray_address: Annotated[StrictStr, Field(pattern=r"^https?://[^/\s]+$")] = "http://127.0.0.1:8265"
    """The cluster's dashboard, which takes jobs."""


class RayExecutor:
    """Jobs are `ADDRESS/SUBMISSION`: the dashboard's address and Ray's submission id."""

    profile_model = RayProfile

    def submit(self, launch: Launch) -> str:
        assert isinstance(launch.profile, RayProfile)  # profile_model is what the profile was read with
        address = launch.profile.ray_address.rstrip("/")
        request = job_request(launch)
        client = _client(address)
        return f"{address}/{_request(address, lambda: _submitted(client, request))}"

    def status(self, job: str) -> JobStatus:
        address, _, submission = job.rpartition("/")
        client = _client(address)
        try:
            info = _request(address, lambda: client.get_job_info(submission))
        except RequestError as error:
            if "status code 404" not in (error.found or ""):
                raise  # a refusal to answer says nothing of the job
            return JobStatus(JobState.LOST, "the cluster does not know the job")
        state = _STATES.get(str(info.status.value), JobState.LOST)
        message = str(info.message or "")
        # Where the job's own process ended it has an exit code; where a node took it along it has none.
        if state is JobState.FAILED and info.driver_exit_code is None:
            state = JobState.LOST
        return JobStatus(state, message.splitlines()[0] if message else "")

    def cancel(self, job: str) -> None:
        address, _, submission = job.rpartition("/")
        client = _client(address)
        if not self.status(job).state.over:
            _request(address, lambda: client.stop_job(submission))


def _submitted(client: Any, request: dict[str, Any]) -> str:
    """The job's id. A cluster that has just been started answers before any of its nodes can take a job."""
    deadline = time.monotonic() + AGENT_SECONDS
    with waiting("a node of the Ray cluster that takes the job", AGENT_SECONDS):
        while True:
            try:
                return str(client.submit_job(**request))
            except RuntimeError as error:
                if "No available agent" not in str(error):
                    raise
                if time.monotonic() > deadline:
                    raise RetryableError(
                        f"no node of the Ray cluster was ready for a job in {AGENT_SECONDS} s",
                        hints=("ray start --dashboard-agent-listen-port=52366   # where another cluster holds 52365",),
                    ) from error
                time.sleep(1)


def job_request(launch: Launch) -> dict[str, Any]:
    """The arguments of Ray's `submit_job`. RequestError for a secret: Ray keeps a job's variables in the clear."""
    launch.refuse_secrets("Ray", "set them where the cluster's nodes are started, before `ray start`")
    lines = [*launch.profile.setup_lines, f"cd {shlex.quote(str(launch.working_dir))}"]
    script = "\n".join([*lines, "exec " + shlex.join(launch.command())])
    return {
        "entrypoint": f"bash -c {shlex.quote(script)}",
        # A run may be submitted again, and Ray does not take an id twice.
        "submission_id": f"{launch.run_id}-{secrets.token_hex(4)}",
        "metadata": {"run": launch.run_id},
        "entrypoint_num_cpus": 0,
        "runtime_env": {
            "env_vars": {
                **launch.variables,
                "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_SECONDS),
                # The run's own environment for its workers counts, not a merger of both, which Ray refuses.
                "RAY_OVERRIDE_JOB_RUNTIME_ENV": "1",
            }
        },
    }


def _client(address: str) -> Any:
    try:
        from ray.job_submission import JobSubmissionClient
    except ImportError as error:
        what, hints = "the ray executor needs Ray with its job API", ("pip install 'nemotron-steps[ray]'",)
        raise UnsupportedError(what, found=str(error), hints=hints) from error
    return _request(address, lambda: JobSubmissionClient(address))


def _request(address: str, question: Any) -> Any:
    """What the cluster answers; its refusals and silence as errors of this package."""
    from ray.exceptions import AuthenticationError

    where = f"ray_address = {address}"
    try:
        return question()
    except AuthenticationError as error:
        what, hint = "the Ray cluster wants a token", "export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=FILE"
        raise RequestError(what, where=where, found=first_line(error), hints=(hint,)) from error
    except OSError as error:
        hints = ("ray start --head --dashboard-port=8265   # on the cluster's first node", "ray status")
        raise RetryableError("no Ray cluster answers", where=where, found=first_line(error), hints=hints) from error
    except RuntimeError as error:
        if isinstance(error, StepsError):
            raise
        raise RequestError("the Ray cluster refused", where=where, found=first_line(error)) from error
