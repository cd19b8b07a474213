"""The Slurm executor: one batch job that runs `steps run` on its first node, with a Ray cluster over the others.

Slurm's commands are on this machine, or through ssh on one that has them; then the run's folder is sent there and
fetched back. Variables travel with the submission or ssh's standard input: no secret is in a file or a process list.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from urllib.parse import quote, unquote

from nemotron_steps.artifacts.files import storage_errors, write_atomic
from nemotron_steps.config.locations import ENVIRONMENT_VARIABLE
from nemotron_steps.errors import RequestError, RetryableError, StorageError, UnsupportedError
from nemotron_steps.runs.executors.base import JobState, JobStatus, Launch
from nemotron_steps.runs.executors.slurm_script import SlurmProfile, batch_script, slurm_profile
from nemotron_steps.waiting import waiting

__all__ = ["SlurmExecutor", "SlurmProfile", "batch_script", "parse_fields"]

_TIMEOUT_S = 60
_HOME = ".steps"
_JOB = re.compile(
    r"ssh://(?:(?P<user>[A-Za-z0-9][\w.-]*)@)?(?P<host>[A-Za-z0-9][\w.-]*)/(?P<number>\d+)"
    r"\?folder=(?P<folder>/[^&]*)(?:&identity=(?P<identity>/[^&]*))?"
)
"""A job that submission through ssh named. Another may have written it: no option, no relative path."""
_DISK_FULL = r"No space left on device|Disk quota exceeded|Wrote only \d+ of \d+ bytes|I/O error writing script"
"""As the system, tar (of a file that fitted in part) and Slurm's controller say it."""


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
        commands = Commands.of_profile(slurm_profile(launch))
        batch_script(_there(launch, commands) if commands.host else launch)

    def submit(self, launch: Launch) -> str:
        """See Executor."""
        profile, folder = slurm_profile(launch), launch.folder
        commands = Commands.of_profile(profile)
        if commands.host:
            launch = _there(launch, commands)
        elif profile.ready_image and not Path(image := profile.container_image or "").is_file():
            raise RequestError("the container's image is not there", where="container_image", found=image)
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
            query = ["sacct", "--noheader", "--allocations", "--parsable2", "--format=State,ExitCode", "-j", number]
            try:
                state, _, code = commands.call(query).partition("\n")[0].partition("|")
            except RequestError:  # no accounting here, or none of this job
                state = code = ""
            if not state:
                return JobStatus(JobState.LOST, "the controller no longer knows the job")
            return JobStatus(_state(state), f"exit code {code}")
        reason = f", {fields['Reason']}" if fields.get("Reason", "None") != "None" else ""
        detail = f"exit code {fields.get('ExitCode', '?')}{reason}"
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


def parse_fields(text: str) -> dict[str, str]:
    """`Key=value` pairs of one line of `scontrol show ... --oneliner`."""
    return dict(re.findall(r"(?:^|\s)([A-Za-z][\w/:]*)=(\S*)", text))


def _state(text: str) -> JobState:
    word = re.match(r"\s*(\w*)", text)  # "CANCELLED by 1000", "COMPLETED+"
    return _STATES.get(word[1] if word else "", JobState.LOST)


@dataclass(frozen=True)
class Commands:
    """Where Slurm's commands are run: on this machine, or on `host` by ssh, whose `folder` jobs work in."""

    host: str = ""
    user: str = ""
    identity: str = ""
    folder: str = ""

    @classmethod
    def of_profile(cls, profile: SlurmProfile) -> Commands:
        """Those of a profile."""
        identity = str(Path(profile.identity).expanduser().absolute()) if profile.identity else ""
        return cls(profile.host or "", profile.user or "", identity, profile.remote_job_dir or "")

    @property
    def home(self) -> PurePosixPath:
        """The home of runs there."""
        return PurePosixPath(self.folder) / _HOME

    def job(self, number: str) -> str:
        """The name of a job that can be asked about without its profile."""
        if not self.host:
            return number
        user = f"{self.user}@" if self.user else ""
        identity = f"&identity={quote(self.identity)}" if self.identity else ""
        return f"ssh://{user}{self.host}/{number}?folder={quote(self.folder)}{identity}"

    @staticmethod
    def of_job(job: str) -> tuple[Commands, str]:
        """The inverse of `job`. RequestError for what it would not give: another may have written it."""
        if job.isdigit():
            return Commands(), job
        found, expected = _JOB.fullmatch(job), "a number, or ssh://HOST/NUMBER?folder=PATH"
        if found is None:
            raise RequestError("this is not a Slurm job", found=job, expected=expected)
        folder, identity = unquote(found["folder"]), unquote(found["identity"] or "")
        return Commands(found["host"], found["user"] or "", identity, folder), found["number"]

    def call(self, command: list[str], environment: Mapping[str, str] | None = None) -> str:
        """What a command prints; `environment` is added to its shell's variables."""
        if not self.host:
            return _run(command, {**os.environ, **(environment or {})}).decode()
        script = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in (environment or {}).items())
        return self._ssh("bash -l -s", (script + f"exec {shlex.join(command)}\n").encode(), command[0]).decode()

    def send(self, folder: Path) -> None:
        """Put a copy of a run's folder into the home there; what is there and not here stays."""
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as archive:
            for file in sorted(folder.iterdir()):
                if file.is_file() and file.suffix != ".lock" and file.name not in ("lock", "job.json"):
                    archive.add(file, f"{folder.name}/{file.name}")
        runs = shlex.quote(str(self.home / "runs"))
        self._ssh(f"mkdir -p {runs} && tar -xzf - -C {runs}", packed.getvalue(), "tar")

    def fetch(self, folder: Path) -> None:
        """Bring what the run's folder there holds into the one here."""
        there = shlex.quote(str(self.home / "runs" / folder.name))
        find = "find . -maxdepth 1 -type f ! -name lock ! -name '*.lock' ! -name '.*.tmp' ! -name job.json -print0"
        # Files come and go while the run writes them: one that went is left out, and tar's 1 is one that grew.
        tar = "tar --ignore-failed-read -czf - --null -T -"
        packed = self._ssh(f"cd {there} && {{ {find} | {tar}; [ $? -le 1 ]; }}", b"", "tar")
        with (
            storage_errors(folder),
            TemporaryDirectory(prefix=".fetched-", dir=folder) as beside,
            tarfile.open(fileobj=io.BytesIO(packed), mode="r:gz") as archive,
        ):
            archive.extractall(beside, filter="data")
            for file in Path(beside).iterdir():  # one by one, whole: a full disk here takes nothing away
                file.replace(folder / file.name)

    def _ssh(self, script: str, stdin: bytes, command: str) -> bytes:
        words = ["ssh", "-o", "BatchMode=yes"]
        words += ["-i", self.identity] if self.identity else []
        words += ["-l", self.user] if self.user else []
        return _run([*words, "--", self.host, script], dict(os.environ), stdin, name=f"{command} on {self.host}")


def _run(command: list[str], environment: Mapping[str, str], stdin: bytes = b"", *, name: str | None = None) -> bytes:
    name = name or command[0]
    try:
        with waiting(name, _TIMEOUT_S):
            result = subprocess.run(
                command, env=environment, input=stdin, capture_output=True, timeout=_TIMEOUT_S, check=False
            )
    except FileNotFoundError as error:
        raise UnsupportedError(
            f"the slurm executor needs {command[0]}, which is not on this machine's PATH",
            hints=("run on a login node of the cluster", 'tunnel = "ssh", host = "LOGIN-NODE" in the profile'),
        ) from error
    except subprocess.TimeoutExpired as error:
        what = f"the Slurm controller did not answer {name} within {_TIMEOUT_S} s"
        raise RetryableError(what, hints=("sinfo",)) from error
    if result.returncode == 0:
        return result.stdout
    message = (result.stderr or result.stdout).decode(errors="replace").strip()
    last = (message or "no reason given").splitlines()[-1]
    ssh = f"ssh {command[command.index('--') + 1]} " if command[0] == "ssh" else ""
    if ssh and result.returncode == 255:
        raise RetryableError("the login node cannot be reached by ssh", found=last, hints=(f"{ssh}true",))
    if ssh and result.returncode == 127:
        raise UnsupportedError(f"there is no {name}", found=last, hints=("is `host` a login node of the cluster?",))
    if full := re.search(rf"^.*(?:{_DISK_FULL}).*$", message, re.MULTILINE):
        free = "free some space and run the same command again: what was committed is kept"
        raise StorageError("the disk is full", where=name, found=full[0].strip(), hints=(f"{ssh}df -h", free))
    if re.search(r"Unable to contact|Connection (refused|timed out)|Socket timed out", message):
        raise RetryableError("the Slurm controller cannot be reached", found=last)
    hints = ("sinfo   # the partitions there are", "--dry-run   # shows the profile's settings")
    raise RequestError(f"{name} refused: {last}", where=name if ssh else " ".join(command[:6]), hints=hints)
