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
import sys
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Annotated, ClassVar, Literal
from urllib.parse import quote, unquote

from pydantic import Field, StrictBool, StrictStr, model_validator

from nemotron_steps.artifacts.files import storage_errors, write_atomic
from nemotron_steps.config.locations import ENVIRONMENT_VARIABLE
from nemotron_steps.config.profiles import Count, Profile
from nemotron_steps.errors import RequestError, RetryableError, StorageError, UnsupportedError
from nemotron_steps.runs.executors.base import JobState, JobStatus, Launch
from nemotron_steps.waiting import waiting

_WARN_S = 120
"""How long before the time limit the job is warned, so that it can save a checkpoint; less for a short limit."""
_RAY_SECONDS = 180
"""How long Ray's first node may take to come up."""


class SlurmProfile(Profile):
    """Keys of `executor = "slurm"`: those without a word of their own here are sbatch's."""

    account: StrictStr | None = None
    partition: StrictStr | None = None
    run_partition: StrictStr | None = None
    """Partition of an attached run (`-r`); default: `partition`."""
    batch_partition: StrictStr | None = None
    """Partition of a detached run (`-b`); default: `partition`."""
    job_name: StrictStr | None = None
    """What the queue shows; default: steps-RUN."""
    ntasks_per_node: Count = 1
    cpus_per_task: Count | None = None
    mem: StrictStr | None = None
    exclusive: StrictBool = False
    time: Annotated[StrictStr, Field(pattern=r"^(\d+-)?\d+(:\d{2}){1,2}$")] | None = None
    """Time limit: [DD-]HH:MM[:SS]."""
    requeue: Annotated[int, Field(strict=True, ge=0)] = 0
    """How often the job is put back into the queue, to go on from its last checkpoint: at its time limit, and when the
    run says that trying again may help (exit code 3). Above 0 Slurm itself may put it back after a lost node."""
    container_image: StrictStr | None = None
    """An image file, or an image that the job imports as one. Empty: no container, whatever the config says."""
    container_runtime: Literal["pyxis", "apptainer"] = "pyxis"
    """What starts the container."""
    mounts: tuple[StrictStr, ...] = ()
    """HOST:CONTAINER pairs."""
    tunnel: Literal["ssh"] | None = None
    """Slurm's commands are on `host`, which sees no file of this machine."""
    host: Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9][\w.-]*$")] | None = None
    """The login node, with tunnel."""
    user: Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9][\w.-]*$")] | None = None
    """On host; None: as ssh's configuration says."""
    identity: StrictStr | None = None
    """ssh's key file."""
    of_image: ClassVar = ("mounts", "container_runtime")
    remote_job_dir: Annotated[StrictStr, Field(pattern=r"^/")] | None = None
    """The folder on `host` that jobs work in; their home is `.steps` in it."""

    @model_validator(mode="after")
    def _complete(self) -> SlurmProfile:
        for mount in self.mounts:
            if ":" not in mount:
                raise ValueError(f"mount {mount!r} is not HOST:CONTAINER")
        needed, others = ("host", "remote_job_dir"), ("host", "user", "identity", "remote_job_dir")
        if self.tunnel is not None and (lacking := [key for key in needed if getattr(self, key) is None]):
            raise ValueError(f"tunnel needs {' and '.join(lacking)} as well")
        if self.tunnel is None and (given := [key for key in others if getattr(self, key) is not None]):
            raise ValueError(f'{", ".join(given)}: for tunnel = "ssh", which is not set')
        return self

    @property
    def limit(self) -> int:
        """The time limit in seconds; 0 for none. Slurm itself would read HH:MM as minutes and seconds."""
        days, _, clock = (self.time or "0:0").rpartition("-")
        hours, minutes, *seconds = (int(part) for part in clock.split(":"))
        return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + sum(seconds)

    @property
    def hours(self) -> float | None:
        """As `Profile.hours`: the time limit, also of each time that it is put back into the queue."""
        return self.limit * (1 + self.requeue) / 3600 or None

    @property
    def ready_image(self) -> bool:
        """Whether the image is a file already, which nothing has to be imported for."""
        image = self.container_image or ""
        return image.endswith((".sqsh", ".squashfs", ".sif")) or image.startswith(("/", "./"))


def batch_script(launch: Launch) -> str:
    """The sbatch script of a run. Every value is quoted; nothing secret is in it."""
    profile = slurm_profile(launch)
    if launch.force_squash and (not profile.container_image or profile.ready_image):
        raise RequestError(
            "--force-squash rebuilds an image file that the job imports, and this profile imports none",
            where="container_image",
            found=f"container_image = {profile.container_image}" if profile.container_image else "no container_image",
            hints=("leave out --force-squash",),
        )
    limit = profile.limit
    time = f"{limit // 86400}-{limit // 3600 % 24:02d}:{limit // 60 % 60:02d}:{limit % 60:02d}" if limit else None
    options: list[tuple[str, object]] = [
        ("job-name", profile.job_name or f"steps-{launch.run_id}"),
        ("output", launch.folder / "slurm-%j.txt"),
        ("open-mode", "append"),
        ("chdir", launch.working_dir),
        ("nodes", profile.nodes),
        ("ntasks-per-node", profile.ntasks_per_node),
        ("account", profile.account),
        ("partition", (profile.run_partition if launch.attached else profile.batch_partition) or profile.partition),
        ("time", time),
        ("signal", f"B:USR1@{min(_WARN_S, limit // 10) if limit else _WARN_S}"),
        ("gpus-per-node", profile.gpus_per_node or None),
        ("cpus-per-task", profile.cpus_per_task),
        ("mem", profile.mem),
    ]
    lines = ["#!/bin/bash"]
    lines += [f"#SBATCH --{name}={_one_line(value)}" for name, value in options if value is not None]
    # Without requeue a lost node is reported, and the same command goes on.
    lines.append("#SBATCH --requeue" if profile.requeue else "#SBATCH --no-requeue")
    if profile.exclusive:
        lines.append("#SBATCH --exclusive")
    lines += ["", "set -u", *profile.setup_lines, ""]
    options_of_srun = program = ""
    if profile.container_image:
        lines += _image_lines(launch)
        options_of_srun, program = _container(launch)
        check = program + shlex.join(["sh", "-c", launch.has_program()])
        lines.append(f"srun --overlap --nodes=1 --ntasks=1 {options_of_srun}{check} || exit")
    elsewhere = bool(profile.container_image) or profile.tunnel is not None
    if profile.nodes > 1:
        lines += _ray_lines(options_of_srun, program, elsewhere=elsewhere)
    command = program + shlex.join(launch.command(in_container=elsewhere))
    where = ""
    if profile.container_image or profile.nodes > 1:
        where = f"srun --overlap --nodes=1 --ntasks=1 {options_of_srun}"
    return "\n".join([*lines, *_run_lines(where + command, profile.requeue)])


def _run_lines(command: str, requeue: int) -> list[str]:
    """The run, with signals handed on; its exit code is the job's."""
    # bash handles a signal only between commands: the run goes to the background and the signal is handed on.
    # The trap comes first and remembers, so that a signal is not lost while the run is being started.
    lines = [
        "run= stop= limit=",
        'stop() { stop=1; [ -z "$run" ] || kill -TERM "$run" 2>/dev/null; }',
        "trap stop TERM INT",
        "trap 'limit=1; stop' USR1  # the time limit is near",
        f"{command} &",
        "run=$!",
        '[ -z "$stop" ] || kill -TERM "$run" 2>/dev/null',
        'wait "$run"; code=$?',
        'while [ "$code" -gt 128 ] && kill -0 "$run" 2>/dev/null; do wait "$run"; code=$?; done',
        '[ "$code" -le 128 ] || { wait "$run"; code=$?; }',
    ]
    if requeue:
        lines += [
            f'if [ "${{SLURM_RESTART_COUNT:-0}}" -lt {requeue} ] && [ "$code" -ne 0 ]; then',
            '    if [ -n "$limit" ] || { [ "$code" -eq 3 ] && [ -z "$stop" ]; }; then',
            '        echo "back into the queue, restart $((${SLURM_RESTART_COUNT:-0} + 1))"',
            '        scontrol requeue "$SLURM_JOB_ID" && sleep 60',
            "    fi",
            "fi",
        ]
    return [*lines, 'exit "$code"', ""]


def slurm_profile(launch: Launch) -> SlurmProfile:
    """A launch's profile, which `profile_model` says is Slurm's."""
    assert isinstance(launch.profile, SlurmProfile)
    return launch.profile


def _image_lines(launch: Launch) -> list[str]:
    """Shell lines that leave the image's file in $image, imported if it is not there."""
    profile = slurm_profile(launch)
    image = profile.container_image or ""
    if profile.ready_image:
        return [f"image={shlex.quote(image)}"]
    source, suffix, importer = image if "://" in image else f"docker://{image}", ".sif", "apptainer pull"
    if profile.container_runtime == "pyxis":
        source, suffix, importer = _enroot_source(source), ".sqsh", "enroot import --output"
    file = launch.home / "containers" / (re.sub(r"[^\w.-]+", "+", image) + suffix)
    again = "true" if launch.force_squash else f"[ ! -f {shlex.quote(str(file))} ]"
    # Imported beside and renamed, so that a job killed half-way leaves no image that looks complete.
    return [
        f"image={shlex.quote(str(file))}",
        f"if {again}; then",
        '    mkdir -p "$(dirname "$image")"',
        f'    {importer} "$image.$SLURM_JOB_ID" {shlex.quote(source)} || exit 1',
        '    mv "$image.$SLURM_JOB_ID" "$image"',
        "fi",
    ]


def _enroot_source(source: str) -> str:
    """An image of a registry as every enroot reads it, docker://[USER@][REGISTRY#]IMAGE[:TAG]; others as they are."""
    found = re.fullmatch(
        r"docker://(?P<user>[^/#]+@(?!sha256:))?((?P<registry>localhost|[^/#@]*[.:][^/#@]*)/)?"
        r"(?P<image>[^#@:]+)(?P<tag>:[^/@#]+)?(?P<digest>@sha256:\w+)?",
        source,
    )
    if found is None:
        return source
    hub = found["registry"] in (None, "docker.io", "index.docker.io")
    registry = "" if hub else f"{found['registry']}#"
    return f"docker://{found['user'] or ''}{registry}{found['image']}{found['digest'] or found['tag'] or ''}"


def _container(launch: Launch) -> tuple[str, str]:
    """(options of srun, what stands before a program) that run it in the image, with the home and the working folder
    at their own paths."""
    profile = slurm_profile(launch)
    named = [Path(file) for file in [launch.environment.get(ENVIRONMENT_VARIABLE)] if file is not None]
    own = [launch.home, launch.working_dir, *named, *launch.unseen(profile.mounts)]
    for path in own:
        if re.search("[:,]", str(path)):
            raise RequestError(
                "a container cannot be given what has ':' or ',' in its path",
                where="mounts",
                found=str(path),
                hints=(shlex.join(["mv", str(path), re.sub("[:,]", "_", str(path))]),),
            )
    mounts = list(dict.fromkeys([*profile.mounts, *(f"{path}:{path}" for path in own)]))
    folder = shlex.quote(str(launch.working_dir))
    if profile.container_runtime == "pyxis":
        listed = shlex.quote(",".join(mounts))
        return f'--container-image="$image" --container-mounts={listed} --container-workdir={folder} ', ""
    binds = " ".join(f"--bind {shlex.quote(mount)}" for mount in mounts)
    gpus = "--nv " if profile.gpus_per_node else ""
    return "", f'apptainer exec {gpus}{binds} --pwd {folder} "$image" '


def _ray_lines(options: str, program: str, *, elsewhere: bool) -> list[str]:
    """A Ray cluster over the job's nodes; the run finds it through RAY_ADDRESS."""
    on_head = f'srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" {options}'
    on_others = f'srun --overlap --nodes="$others" --ntasks="$others" --exclude="$head" {options}'
    ray = "ray" if elsewhere else shlex.join([sys.executable, "-m", "ray.scripts.scripts"])
    start = f"env -u RAY_ADDRESS {program}{ray} start --disable-usage-stats --block"
    return [
        'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "others=$((SLURM_JOB_NUM_NODES - 1))",
        # A node's address is not always its name. Jobs may share a node: each has a port of its own.
        'address=$(scontrol show node "$head" --oneliner | sed -n "s/.* NodeAddr=\\([^ ]*\\).*/\\1/p")',
        "address=$(getent ahostsv4 \"$address\" | awk 'NR == 1 {print $1}')",
        "port=$((20000 + SLURM_JOB_ID % 10000))",
        'export RAY_ADDRESS="$address:$port"',
        # Whoever else is on the network may not use the cluster.
        'if [ -z "${RAY_AUTH_MODE:-}" ]; then',
        '    RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d " \\n")',
        "    export RAY_AUTH_MODE=token RAY_AUTH_TOKEN",
        "fi",
        f'{on_head}{start} --head --node-ip-address="$address" --port="$port" --include-dashboard=false &',
        "SECONDS=0",
        "until (exec 3<>/dev/tcp/$address/$port) 2>/dev/null; do",
        f'    [ "$SECONDS" -lt {_RAY_SECONDS} ] || {{ echo "Ray did not start on $head" >&2; exit 3; }}',
        "    sleep 1",
        "done",
        f'{on_others}{start} --address="$RAY_ADDRESS" &',
        "",
    ]


def _one_line(value: object) -> str:
    text = str(value)
    if "\n" in text:
        raise RequestError("a profile value must be one line", found=repr(text))
    return shlex.quote(text) if re.search(r"\s", text) else text


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
        commands = Commands.of_profile(slurm_profile(launch))
        batch_script(_there(launch, commands) if commands.host else launch)

    def submit(self, launch: Launch) -> str:
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
        # To the batch script, whose shell hands it on to the run; Slurm kills what is left after KillWait.
        commands, number = Commands.of_job(job)
        status = self.status(job)
        if status.state is JobState.PENDING:
            commands.call(["scancel", number])
        elif not status.state.over:
            commands.call(["scancel", "--signal=TERM", "--batch", number])

    def fetch(self, job: str, folder: Path) -> None:
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
