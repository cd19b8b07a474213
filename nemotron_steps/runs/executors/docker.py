"""The Docker executor: a run in a container of an image, on this machine, with Docker or Podman. Values of variables
are handed to the engine's command in its own environment, not in its arguments."""

import os
import re
import secrets
import shlex
import subprocess
from typing import ClassVar, Literal

from pydantic import StrictStr

from nemotron_steps.config.locations import ENVIRONMENT_VARIABLE
from nemotron_steps.config.profiles import Profile
from nemotron_steps.errors import RequestError, RetryableError, StorageError, UnsupportedError
from nemotron_steps.runs.executors.base import JobState, JobStatus, Launch
from nemotron_steps.sandbox.containers import podman_ulimits
from nemotron_steps.waiting import waiting

_PULL_SECONDS = 3600
_ANSWER_SECONDS = 60
_MEMORY_KILL = 137


class DockerProfile(Profile):
    """Keys of `executor = "docker"`."""

    of_image: ClassVar = ("container_image",)
    nodes: Literal[1] = 1
    container_image: StrictStr | None = None
    """An image here or of a registry."""
    engine: Literal["docker", "podman"] = "docker"
    """What starts the container."""
    mounts: tuple[StrictStr, ...] = ()
    """HOST:CONTAINER pairs. The home, the working folder and the file of profiles are mounted anyway, unless one is a
    CONTAINER here."""
    shm_size: StrictStr = "16g"
    """Shared memory, which workers exchange tensors through."""


class DockerExecutor:
    """Jobs are `ENGINE/CONTAINER`."""

    profile_model = DockerProfile

    def submit(self, launch: Launch) -> str:
        name = f"steps-{launch.run_id}-{secrets.token_hex(4)}"
        command = run_command(launch, name)
        _call(command, _PULL_SECONDS, {**os.environ, **launch.variables})
        return f"{command[0]}/{name}"

    def status(self, job: str) -> JobStatus:
        engine, name = _parts(job)
        template = "{{.State.Status}} {{.State.ExitCode}} {{.State.OOMKilled}}"
        try:
            said = _call([engine, "inspect", "--type", "container", "--format", template, name]).split()
        except RequestError as error:
            if not re.search("no such (container|object)", error.what, re.IGNORECASE):
                raise  # a refusal to answer says nothing of the container
            return JobStatus(JobState.LOST, "the container is gone")
        state, code, out_of_memory = said
        if state in ("created", "initialized"):
            return JobStatus(JobState.PENDING)
        if state not in ("exited", "stopped", "dead"):
            return JobStatus(JobState.RUNNING, state)
        if out_of_memory == "true":
            return JobStatus(JobState.OUT_OF_MEMORY, f"exit code {code}")
        over = JobState.DONE if code == "0" else JobState.LOST if code == str(_MEMORY_KILL) else JobState.FAILED
        # Nothing but the engine keeps what was written before the run could say anything.
        see = f"; see: {engine} logs {name}" if over is JobState.FAILED else ""
        return JobStatus(over, f"exit code {code}{see}")

    def cancel(self, job: str) -> None:
        engine, name = _parts(job)
        if not self.status(job).state.over:
            _call([engine, "kill", "--signal", "TERM", name])


def run_command(launch: Launch, name: str) -> list[str]:
    """The engine's command that starts a container of this name in the background."""
    profile = launch.profile
    assert isinstance(profile, DockerProfile)  # profile_model is what the profile was read with
    variables = launch.variables
    mounted = {mount.split(":")[1] for mount in profile.mounts if ":" in mount}
    own = {str(path): f"{path}:{path}" for path in (launch.home, launch.working_dir)}
    if ENVIRONMENT_VARIABLE in variables:
        file = variables[ENVIRONMENT_VARIABLE]
        own.setdefault(file, f"{file}:{file}:ro")
    own |= {str(path): f"{path}:{path}" for path in launch.unseen(profile.mounts)}
    mounts = dict.fromkeys((*profile.mounts, *(mount for path, mount in own.items() if path not in mounted)))
    words = [profile.engine, "run", "--detach", "--init", "--name", name, "--network", "host"]
    words += ["--shm-size", profile.shm_size, "--workdir", str(launch.working_dir)]
    words += ["--pull", "always" if launch.force_squash else "missing"]
    gpus = ["--gpus", str(profile.gpus_per_node)]
    if profile.engine == "podman":
        words += podman_ulimits()  # its own default may be above what this process may grant
        gpus = ["--device", "nvidia.com/gpu=all"]
    words += gpus if profile.gpus_per_node else []
    words += [word for mount in mounts for word in ("--volume", mount)]
    words += [word for variable in variables for word in ("--env", variable)]
    check = launch.has_program()
    script = "\n".join([*profile.setup_lines, check, "exec " + shlex.join(launch.command(in_container=True))])
    return [*words, profile.container_image or "", "bash", "-c", script]


def _parts(job: str) -> tuple[str, str]:
    engine, _, name = job.partition("/")
    if engine not in ("docker", "podman") or not name.startswith("steps-"):
        expected = "docker/steps-... or podman/steps-..."
        raise RequestError("this is not a container of a run", found=job, expected=expected)
    return engine, name


def _call(command: list[str], seconds: int = _ANSWER_SECONDS, environment: dict[str, str] | None = None) -> str:
    engine = command[0]
    try:
        with waiting(f"`{' '.join(command[:2])}`", seconds):
            result = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=seconds, check=False
            )
    except FileNotFoundError as error:
        what = f"the docker executor needs {engine}, which is not on this machine's PATH"
        hints = ("https://docs.docker.com/engine/install", 'engine = "podman" in the profile')
        raise UnsupportedError(what, hints=hints) from error
    except subprocess.TimeoutExpired as error:
        raise RetryableError(f"{engine} did not answer within {seconds} s", hints=(f"{engine} info",)) from error
    if result.returncode == 0:
        return result.stdout
    # Docker's last words are where its help is.
    lines = [line for line in (result.stderr or result.stdout).splitlines() if line.strip() and "--help" not in line]
    last = lines[-1].strip() if lines else "no reason given"
    if "Cannot connect to the Docker daemon" in last:
        raise RetryableError(f"no {engine} daemon answers", found=last, hints=(f"{engine} info",))
    if "no space left on device" in last.lower():
        hints = (f"{engine} system df", f"{engine} image prune")
        raise StorageError(f"the disk that {engine} keeps images on is full", found=last, hints=hints)
    raise RequestError(f"{engine} refused: {last}", where=" ".join(command[:2]), hints=(f"{engine} images",))
