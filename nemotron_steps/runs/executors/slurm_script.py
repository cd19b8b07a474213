"""The batch script of a run on Slurm: what sbatch is asked for, the container, Ray over the nodes, the run itself."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, StrictBool, StrictStr, model_validator

from nemotron_steps.config.locations import ENVIRONMENT_VARIABLE
from nemotron_steps.config.profiles import Count, Profile
from nemotron_steps.errors import RequestError
from nemotron_steps.runs.executors.base import Launch

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
    # [DD-]HH:MM[:SS]. Slurm itself would read HH:MM as minutes and seconds.
    days, _, clock = (profile.time or "0:0").rpartition("-")
    hours, minutes, *seconds = (int(part) for part in clock.split(":"))
    limit = ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + sum(seconds)
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
