"""The Slurm executor: one batch job that runs `steps run` on its first node, with a Ray cluster over the others.

The script and what the job printed lie in the run folder. Environment variables travel with the submission, not in
the script, so that no secret is written down. The controller is asked with `scontrol`, and `sacct` once it has
forgotten the job.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from nemotron_steps.artifacts.files import write_atomic
from nemotron_steps.config.locations import ENVIRONMENT_VARIABLE
from nemotron_steps.errors import RequestError, UnsupportedError
from nemotron_steps.runs.executors.base import JobState, JobStatus, Launch
from nemotron_steps.runs.executors.slurm_commands import Commands
from nemotron_steps.runs.executors.slurm_script import SlurmProfile, batch_script

__all__ = ["SlurmExecutor", "SlurmProfile", "batch_script", "parse_fields"]

SCRIPT = "slurm.sh"
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


class SlurmExecutor:
    """Jobs are Slurm job ids; of a cluster reached through ssh, URLs of one (see Commands.job)."""

    profile_model = SlurmProfile

    def check(self, launch: Launch) -> None:
        """See Executor."""
        commands = _commands(launch)
        batch_script(_there(launch, commands) if commands.host else launch)

    def submit(self, launch: Launch) -> str:
        """See Executor."""
        profile = launch.profile
        assert isinstance(profile, SlurmProfile)  # profile_model is what the profile was read with
        commands, folder = _commands(launch), launch.folder
        if commands.host:
            launch = _there(launch, commands)
        elif profile.ready_image and not Path(profile.container_image or "").is_file():
            raise RequestError(
                "the container's image is not there", where="container_image", found=profile.container_image
            )
        write_atomic(folder / SCRIPT, batch_script(launch).encode())
        if commands.host:
            commands.send(folder)
        command = ["sbatch", "--parsable", "--export=ALL", str(launch.folder / SCRIPT)]
        output = commands.call(command, launch.variables)
        number = output.strip().rpartition("\n")[2].partition(";")[0]
        if not number.isdigit():
            raise RequestError("sbatch did not say which job it submitted", where=SCRIPT, found=output.strip())
        return commands.job(number)

    def status(self, job: str) -> JobStatus:
        """See Executor."""
        commands, number = Commands.of_job(job)
        try:
            fields = parse_fields(commands.call(["scontrol", "show", "job", number, "--oneliner"]))
        except UnsupportedError:  # nobody to ask says nothing of the job
            raise
        except RequestError:
            return _from_accounting(commands, number)
        reason = fields.get("Reason", "None")
        detail = f"exit code {fields.get('ExitCode', '?')}" + (f", {reason}" if reason != "None" else "")
        return JobStatus(_state(fields.get("JobState", "")), detail)

    def cancel(self, job: str) -> None:
        """See Executor."""
        # To the batch script, whose shell hands it on to the run; Slurm kills what is left after KillWait.
        commands, number = Commands.of_job(job)
        status = self.status(job)
        if status.state is JobState.PENDING:
            commands.call(["scancel", number])
        elif not status.state.over:
            commands.call(["scancel", "--signal=TERM", "--batch", number])

    def fetch(self, job: str, folder: Path) -> None:
        """See Executor."""
        commands, _ = Commands.of_job(job)
        if commands.host:
            commands.fetch(folder)


def _commands(launch: Launch) -> Commands:
    profile = launch.profile
    assert isinstance(profile, SlurmProfile)
    return Commands(profile.host or "", profile.user or "", profile.identity_file, profile.remote_job_dir or "")


def _there(launch: Launch, commands: Commands) -> Launch:
    """A launch as the machine at the other end of ssh sees it: a home and a working folder of its own."""
    words = list(launch.arguments)
    words[words.index("--home") + 1] = str(commands.home)
    return replace(
        launch,
        folder=Path(commands.home / "runs" / launch.run_id),
        working_dir=Path(commands.folder),
        arguments=tuple(words),
        environment={name: value for name, value in launch.environment.items() if name != ENVIRONMENT_VARIABLE},
    )


def _from_accounting(commands: Commands, number: str) -> JobStatus:
    unknown = JobStatus(JobState.LOST, "the controller no longer knows the job")
    try:
        output = commands.call(
            ["sacct", "--noheader", "--allocations", "--parsable2", "--format=State,ExitCode", "-j", number]
        )
    except RequestError:  # no accounting here, or none of this job
        return unknown
    line = next(iter(output.splitlines()), "")
    if not line:
        return unknown
    state, _, code = line.partition("|")
    return JobStatus(_state(state), f"exit code {code}")


def parse_fields(text: str) -> dict[str, str]:
    """`Key=value` pairs of one line of `scontrol show ... --oneliner`."""
    return dict(re.findall(r"(?:^|\s)([A-Za-z][\w/:]*)=(\S*)", text))


def _state(text: str) -> JobState:
    # "CANCELLED by 1000", "COMPLETED+"
    word = re.split(r"[\s+]", text.strip(), maxsplit=1)[0]
    return _STATES.get(word, JobState.LOST)
