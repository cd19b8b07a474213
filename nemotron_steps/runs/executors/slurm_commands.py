"""Slurm's commands, on this machine or through ssh on one that has them.

Through ssh nothing is shared: the run's folder is sent there before the job is submitted and fetched back while it
works. Variables of the job go through ssh's standard input, so that no secret is in a file or a list of processes.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from urllib.parse import parse_qs, quote, urlsplit

from nemotron_steps.artifacts.files import storage_errors
from nemotron_steps.errors import RequestError, RetryableError, StorageError, UnsupportedError
from nemotron_steps.waiting import waiting

_TIMEOUT_S = 60
_HOME = ".steps"
_WORD = r"[A-Za-z0-9][\w.-]*"
_DISK_FULL = r"No space left on device|Disk quota exceeded|Wrote only \d+ of \d+ bytes|I/O error writing script"
"""As the system, tar (of a file that fitted in part) and Slurm's controller say it."""


@dataclass(frozen=True)
class Commands:
    """Where Slurm's commands are run.

    Attributes:
        host: the machine to reach by ssh; empty for this one.
        user: who to be there; empty for what ssh's own configuration says.
        identity: key file; empty likewise.
        folder: the folder there that jobs work in; its `.steps` is their home.
    """

    host: str = ""
    user: str = ""
    identity: str = ""
    folder: str = ""

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
        parts = urlsplit(job)
        number = parts.path.removeprefix("/")
        given = {name: values[0] for name, values in parse_qs(parts.query).items()}
        # Not parts.hostname, which is in small letters: ssh's own names of hosts need not be.
        user, _, host = parts.netloc.rpartition("@")
        here = Commands(host, user, given.get("identity", ""), given.get("folder", ""))
        fits = (
            parts.scheme == "ssh"
            and number.isdigit()
            and re.fullmatch(_WORD, here.host)
            and (not here.user or re.fullmatch(_WORD, here.user))
            and all(path.startswith("/") for path in (here.folder, here.identity or "/"))
        )
        if not fits:
            raise RequestError("this is no Slurm job", found=job, expected="a number, or ssh://HOST/NUMBER?folder=PATH")
        return here, number

    def call(self, command: list[str], environment: Mapping[str, str] | None = None) -> str:
        """What a command prints.

        Args:
            environment: variables it gets beside those of the shell it runs in.

        Raises:
            UnsupportedError: the command is not there.
            RequestError: it refuses, with what it said.
            RetryableError: no answer from the controller or the machine.
        StorageError: a disk is full there.
        """
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
        raise RetryableError(
            f"the Slurm controller did not answer {name} within {_TIMEOUT_S} s", hints=("sinfo",)
        ) from error
    if result.returncode == 0:
        return result.stdout
    message = (result.stderr or result.stdout).decode(errors="replace").strip()
    last = message.splitlines()[-1] if message else "no reason given"
    if command[0] == "ssh" and result.returncode == 255:
        raise RetryableError(
            "the machine of the profile cannot be reached by ssh",
            found=last,
            hints=(f"ssh {command[command.index('--') + 1]} true",),
        )
    if command[0] == "ssh" and result.returncode == 127:
        raise UnsupportedError(f"there is no {name}", found=last, hints=("is `host` a login node of the cluster?",))
    full = re.search(rf"^.*(?:{_DISK_FULL}).*$", message, re.MULTILINE)
    if full is not None:
        host = f"ssh {command[command.index('--') + 1]} " if command[0] == "ssh" else ""
        raise StorageError(
            "the disk is full" + (" where jobs work" if host else ""),
            where=name,
            found=full[0].strip(),
            hints=(f"{host}df -h", "free some space and run the same command again: what was committed is kept"),
        )
    if re.search(r"Unable to contact|Connection (refused|timed out)|Socket timed out", message):
        raise RetryableError("the Slurm controller cannot be reached", found=last)
    raise RequestError(
        f"{name} refused: {last}",
        where=" ".join(command[:6]) if command[0] != "ssh" else name,
        hints=("sinfo   # the partitions there are", "--dry-run   # shows the profile's settings"),
    )
