"""The Slurm executor: one batch job that runs `steps run` on its first node, with a Ray cluster over the others.

The script and what the job printed lie in the run folder. Environment variables travel with the submission, not in
the script, so that no secret is written down. The controller is asked with `scontrol`, and `sacct` once it has
forgotten the job.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from typing import Annotated

from pydantic import Field, StrictBool, StrictStr, model_validator

from nemotron_steps.artifacts.files import write_atomic
from nemotron_steps.config.profiles import Count, Profile
from nemotron_steps.errors import RequestError, RetryableError, UnsupportedError
from nemotron_steps.runs.executors.base import JobState, JobStatus, Launch

SCRIPT = "slurm.sh"
_TIMEOUT_S = 60
_STATES = {
    **dict.fromkeys(("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED"), JobState.PENDING),
    **dict.fromkeys(("RUNNING", "COMPLETING", "STAGE_OUT", "SIGNALING", "STOPPED"), JobState.RUNNING),
    "COMPLETED": JobState.DONE,
    "FAILED": JobState.FAILED,
    "CANCELLED": JobState.CANCELLED,
    **dict.fromkeys(("TIMEOUT", "DEADLINE"), JobState.TIMED_OUT),
    "OUT_OF_MEMORY": JobState.OUT_OF_MEMORY,
    **dict.fromkeys(("NODE_FAIL", "BOOT_FAIL", "PREEMPTED", "REVOKED"), JobState.LOST),
}
_WARN_S = 120
"""How long before the time limit the job is told, so that it can save a checkpoint; less for a short limit."""
_RAY_PORT = 26379


class SlurmProfile(Profile):
    """Keys of `executor = "slurm"`, named as sbatch names them."""

    account: StrictStr | None = None
    partition: StrictStr | None = None
    run_partition: StrictStr | None = None
    """Partition of an attached run (`-r`); default: `partition`."""
    batch_partition: StrictStr | None = None
    """Partition of a detached run (`-b`); default: `partition`."""
    ntasks_per_node: Count = 1
    cpus_per_task: Count | None = None
    mem: StrictStr | None = None
    exclusive: StrictBool = False
    time: Annotated[StrictStr, Field(pattern=r"^(\d+-)?\d+(:\d{2}){1,2}$")] | None = None
    """Time limit: [DD-]HH:MM[:SS]."""
    container_image: StrictStr | None = None
    """A squash file, or an image that the job imports as one with enroot."""
    mounts: tuple[StrictStr, ...] = ()
    """HOST:CONTAINER pairs."""

    @model_validator(mode="after")
    def _complete(self) -> SlurmProfile:
        for mount in self.mounts:
            if ":" not in mount:
                raise ValueError(f"mount {mount!r} is not HOST:CONTAINER")
        if self.mounts and self.container_image is None:
            raise ValueError("mounts are for a container: container_image is not set")
        return self

    def partition_of(self, *, attached: bool) -> str | None:
        """The partition of a run that somebody waits for, or of one that nobody does; None for the cluster's own."""
        return (self.run_partition if attached else self.batch_partition) or self.partition

    @property
    def ready_image(self) -> bool:
        """Whether the image is a squash file already, which nothing has to be imported for."""
        image = self.container_image or ""
        return image.endswith((".sqsh", ".squashfs")) or image.startswith(("/", "./"))


class SlurmExecutor:
    """Jobs are Slurm job ids."""

    profile_model = SlurmProfile

    def submit(self, launch: Launch) -> str:
        """See Executor."""
        script = launch.folder / SCRIPT
        write_atomic(script, batch_script(launch).encode())
        environment = {**os.environ, **launch.profile.env_vars, **launch.environment}
        output = _call(["sbatch", "--parsable", "--export=ALL", str(script)], environment=environment)
        job = output.strip().partition(";")[0]
        if not job.isdigit():
            raise RequestError("sbatch did not say which job it submitted", where=str(script), found=output.strip())
        return job

    def status(self, job: str) -> JobStatus:
        """See Executor."""
        try:
            fields = parse_fields(_call(["scontrol", "show", "job", job, "--oneliner"]))
        except RequestError:
            return self._from_accounting(job)
        reason = fields.get("Reason", "None")
        detail = f"exit code {fields.get('ExitCode', '?')}" + (f", {reason}" if reason != "None" else "")
        return JobStatus(_state(fields.get("JobState", "")), detail)

    def cancel(self, job: str) -> None:
        """See Executor."""
        # To the batch script, whose shell hands it on to the run; Slurm kills what is left after KillWait.
        status = self.status(job)
        if status.state is JobState.PENDING:
            _call(["scancel", job])
        elif not status.state.over:
            _call(["scancel", "--signal=TERM", "--batch", job])

    def _from_accounting(self, job: str) -> JobStatus:
        if shutil.which("sacct") is None:
            return JobStatus(JobState.LOST, "the controller no longer knows the job")
        try:
            output = _call(
                ["sacct", "--noheader", "--allocations", "--parsable2", "--format=State,ExitCode", "-j", job]
            )
        except RequestError:
            return JobStatus(JobState.LOST, "the controller no longer knows the job")
        line = next(iter(output.splitlines()), "")
        if not line:
            return JobStatus(JobState.LOST, "the controller no longer knows the job")
        state, _, code = line.partition("|")
        return JobStatus(_state(state), f"exit code {code}")


def batch_script(launch: Launch) -> str:
    """The sbatch script of a run. Every value is quoted; nothing secret is in it."""
    profile = _profile(launch)
    if launch.force_squash and (profile.container_image is None or profile.ready_image):
        raise RequestError(
            "--force-squash rebuilds a squash file that the job imports, and this profile imports none",
            found=f"container_image = {profile.container_image}" if profile.container_image else "no container_image",
        )
    limit = _limit_seconds(profile.time) if profile.time else 0
    options: list[tuple[str, object]] = [
        ("job-name", f"steps-{launch.run_id}"),
        ("output", launch.folder / "slurm-%j.txt"),
        ("open-mode", "append"),
        ("chdir", launch.working_dir),
        ("nodes", profile.nodes),
        ("ntasks-per-node", profile.ntasks_per_node),
        ("account", profile.account),
        ("partition", profile.partition_of(attached=launch.attached)),
        ("time", _time(limit) if limit else None),
        ("signal", f"B:TERM@{min(_WARN_S, limit // 10) if limit else _WARN_S}"),
        ("gpus-per-node", profile.gpus_per_node or None),
        ("cpus-per-task", profile.cpus_per_task),
        ("mem", profile.mem),
    ]
    lines = ["#!/bin/bash"]
    lines += [f"#SBATCH --{name}={_one_line(value)}" for name, value in options if value is not None]
    lines.append("#SBATCH --no-requeue")  # a lost node is reported, and the same command goes on
    if profile.exclusive:
        lines.append("#SBATCH --exclusive")
    lines += ["", "set -u", *profile.setup_lines, ""]
    container = ""
    if profile.container_image is not None:
        lines += _container_lines(launch)
        container = '--container-image="$image"'
        mounts = [*profile.mounts, *(f"{path}:{path}" for path in (launch.folder, launch.working_dir))]
        container += f" --container-mounts={shlex.quote(','.join(dict.fromkeys(mounts)))}"
        container += f" --container-workdir={shlex.quote(str(launch.working_dir))}"
    if profile.nodes > 1:
        lines += _ray_lines(container)
    command = shlex.join(launch.command(in_container=bool(container)))
    where = f"srun --overlap --nodes=1 --ntasks=1 {container} " if container or profile.nodes > 1 else ""
    # bash handles a signal only between commands: the run goes to the background and the signal is handed on.
    # The trap comes first and remembers, so that a signal is not lost while the run is being started.
    lines += [
        "run= stop=",
        'trap \'stop=1; [ -z "$run" ] || kill -TERM "$run" 2>/dev/null\' TERM INT',
        f"{where}{command} &",
        "run=$!",
        '[ -z "$stop" ] || kill -TERM "$run" 2>/dev/null',
        'wait "$run"; code=$?',
        '[ "$code" -le 128 ] || { wait "$run"; code=$?; }',
        'exit "$code"',
        "",
    ]
    return "\n".join(lines)


def parse_fields(text: str) -> dict[str, str]:
    """`Key=value` pairs of one line of `scontrol show ... --oneliner`."""
    return dict(re.findall(r"(?:^|\s)([A-Za-z][\w/:]*)=(\S*)", text))


def _profile(launch: Launch) -> SlurmProfile:
    assert isinstance(launch.profile, SlurmProfile)  # profile_model is what the profile was read with
    return launch.profile


def _container_lines(launch: Launch) -> list[str]:
    profile = _profile(launch)
    image = profile.container_image or ""
    if profile.ready_image:
        return [f"image={shlex.quote(image)}"]
    name = re.sub(r"[^\w.-]+", "+", image) + ".sqsh"
    file = launch.folder.parent.parent / "containers" / name
    again = "true" if launch.force_squash else f"[ ! -f {shlex.quote(str(file))} ]"
    source = image if "://" in image else f"docker://{image}"
    # Imported beside and renamed, so that a job killed half-way leaves no image that looks complete.
    return [
        f"image={shlex.quote(str(file))}",
        f"if {again}; then",
        '    mkdir -p "$(dirname "$image")"',
        f'    enroot import --output "$image.$SLURM_JOB_ID" {shlex.quote(source)} || exit 1',
        '    mv "$image.$SLURM_JOB_ID" "$image"',
        "fi",
    ]


def _ray_lines(container: str) -> list[str]:
    """A Ray cluster over the job's nodes; the run finds it through RAY_ADDRESS."""
    on_head = f'srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" {container}'
    on_others = f'srun --overlap --nodes="$others" --ntasks="$others" --exclude="$head" {container}'
    return [
        'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "others=$((SLURM_JOB_NUM_NODES - 1))",
        "address=$(getent ahostsv4 \"$head\" | awk 'NR == 1 {print $1}')",
        f'export RAY_ADDRESS="$address:{_RAY_PORT}"',
        f'{on_head} env -u RAY_ADDRESS ray start --head --node-ip-address="$address" --port={_RAY_PORT} --block &',
        "sleep 10",
        f'{on_others} env -u RAY_ADDRESS ray start --address="$address:{_RAY_PORT}" --block &',
        "",
    ]


def _limit_seconds(text: str) -> int:
    """[DD-]HH:MM[:SS] in seconds. Slurm itself would read HH:MM as minutes and seconds."""
    days, _, clock = text.rpartition("-")
    hours, minutes, *rest = (int(part) for part in clock.split(":"))
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + (rest[0] if rest else 0)


def _time(limit: int) -> str:
    return f"{limit // 86400}-{limit // 3600 % 24:02d}:{limit // 60 % 60:02d}:{limit % 60:02d}"


def _state(text: str) -> JobState:
    # "CANCELLED by 1000", "COMPLETED+"
    word = re.split(r"[\s+]", text.strip(), maxsplit=1)[0]
    return _STATES.get(word, JobState.LOST)


def _one_line(value: object) -> str:
    text = str(value)
    if "\n" in text:
        raise RequestError("a profile value must be one line", found=repr(text))
    return shlex.quote(text) if re.search(r"\s", text) else text


def _call(command: list[str], environment: Mapping[str, str] | None = None) -> str:
    try:
        result = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except FileNotFoundError as error:
        raise UnsupportedError(
            f"the slurm executor needs {command[0]}, which is not on this machine's PATH",
            hints=("run on a login node of the cluster", "steps doctor"),
        ) from error
    except subprocess.TimeoutExpired as error:
        raise RetryableError(
            f"the Slurm controller did not answer {command[0]} within {_TIMEOUT_S} s", hints=("sinfo",)
        ) from error
    if result.returncode != 0:
        message = (result.stderr or result.stdout).strip()
        if re.search(r"Unable to contact|Connection (refused|timed out)|Socket timed out", message):
            raise RetryableError("the Slurm controller cannot be reached", found=message.splitlines()[-1])
        raise RequestError(
            f"{command[0]} refused: {message.splitlines()[-1] if message else 'no reason given'}",
            where=" ".join(command),
            hints=("sinfo   # the partitions there are", "steps run ... --dry-run   # shows the profile's settings"),
        )
    return result.stdout
