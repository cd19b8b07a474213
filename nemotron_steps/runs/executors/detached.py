"""The local executor of a detached run: a process of its own that outlives the terminal."""

import os
import shlex
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Literal

from nemotron_steps.config.profiles import Profile
from nemotron_steps.errors import RequestError
from nemotron_steps.runs.executors.base import JobState, JobStatus, Launch

CONSOLE = "console.txt"
"""What the process printed, in the run folder; log.txt is the run's own log."""


class LocalProfile(Profile):
    """Keys of `executor = "local"`: those of every executor, on this one machine."""

    nodes: Literal[1] = 1


class DetachedExecutor:
    """Jobs are `PID@START`: a process id and its start time, so that a reused id is not taken for the job."""

    profile_model = LocalProfile

    def submit(self, launch: Launch) -> str:
        if not launch.working_dir.is_dir():
            raise RequestError(
                "the folder to work in is not there",
                where=str(launch.working_dir),
                hints=(f"mkdir -p {shlex.quote(str(launch.working_dir))}",),
            )
        script = [*launch.command()]
        if launch.profile.setup_lines:
            script = ["bash", "-c", "\n".join([*launch.profile.setup_lines, 'exec "$@"']), "bash", *script]
        with (launch.folder / CONSOLE).open("ab") as console:
            process = subprocess.Popen(
                script,
                cwd=launch.working_dir,
                env={**os.environ, **launch.variables},
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                start_new_session=True,
            )
        return f"{process.pid}@{_start_time(process.pid) or 0}"

    def status(self, job: str) -> JobStatus:
        # How a process ended is in its run folder, not known here: over is LOST.
        pid = _pid_if_alive(job)
        return JobStatus(JobState.RUNNING, f"process {pid}") if pid else JobStatus(JobState.LOST, "the process is gone")

    def cancel(self, job: str) -> None:
        pid = _pid_if_alive(job)
        if pid is None:
            return
        with suppress(ProcessLookupError):  # it ends at this moment
            process = os.pidfd_open(pid)
            try:
                if _pid_if_alive(job):  # and is this one still
                    signal.pidfd_send_signal(process, signal.SIGTERM)
            finally:
                os.close(process)


def _pid_if_alive(job: str) -> int | None:
    pid, _, started = job.partition("@")
    return int(pid) if pid.isdigit() and _start_time(int(pid)) == int(started or 0) else None


def _start_time(pid: int) -> int | None:
    """Clock ticks after boot at which a process started; None if there is none or it is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19])
