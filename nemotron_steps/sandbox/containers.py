"""Docker, Podman and Apptainer, through their command lines: for programs that need an image. A program's clock is the
first process of its container: it starts with the program, and ends it where this process was killed."""

import json
import resource
import secrets
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from nemotron_steps.errors import SandboxError, UnsupportedError
from nemotron_steps.sandbox.base import Limits, Outcome, Sandbox, SandboxResult
from nemotron_steps.sandbox.probe import probe
from nemotron_steps.sandbox.process import Ended, run_process
from nemotron_steps.sandbox.seccomp import container_profile
from nemotron_steps.waiting import waiting

Engine = Literal["docker", "podman", "apptainer"]
ENGINES: tuple[Engine, ...] = ("docker", "podman", "apptainer")

WORK = "/scratch"
INPUTS = "/inputs"
USER_ID = 65534
USER = f"{USER_ID}:{USER_ID}"
LABEL = "nemotron-steps"
ENGINE_TIMEOUT_S = 120.0
"""For the engine's own work (starting, copying, removing), not for the program."""

_HINTS: dict[str, str] = {
    "docker": "https://docs.docker.com/engine/install, then: docker info",
    "podman": "apt-get install -y podman",
    "apptainer": "https://apptainer.org/docs/admin/main/installation.html, then: apptainer version",
}
_LAUNCH = f'cp -r {INPUTS}/. . && exec "$@"'
KILLED_BY_CLOCK = frozenset({124, 137})
_NO_ANSWER = frozenset({125, 126, 127, 137})
"""Exit codes that the engine gives for failures of its own, or of the kernel's memory killer, and any program can."""


class ContainerSandbox(Sandbox):
    """A fresh container a run. The image needs /bin/sh, cp, timeout and, for `code`, a Python (`python`)."""

    def __init__(
        self, engine: Engine, image: str, *, python: str = "python3", max_concurrency: int | None = None
    ) -> None:
        super().__init__(max_concurrency)
        self.engine = engine
        self.image = image
        self.python = python

    async def probe(self) -> None:
        """See Sandbox.probe. The image's own files are the program's to read; the host's are not."""
        await check_engine(self.engine)
        await probe(self, hidden_memory=False)

    async def execute(self, argv: list[str], stdin: bytes, files: Mapping[str, bytes], limits: Limits) -> SandboxResult:
        """See Sandbox.execute."""
        name = f"steps-sandbox-{secrets.token_hex(8)}"
        with tempfile.TemporaryDirectory(prefix="sandbox-") as folder:
            inputs, profile = Path(folder) / "inputs", Path(folder) / "seccomp.json"
            inputs.mkdir()
            for path, content in files.items():
                target = inputs / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)
            # Readable to whoever the program runs as, whatever this process's umask is; the folder around is private.
            for made in (inputs, *inputs.rglob("*")):
                made.chmod(0o755 if made.is_dir() else 0o644)
            profile.write_text(json.dumps(container_profile(session=False)))
            try:
                ended = await run_process(
                    self.command(name, argv, str(inputs), str(profile), limits),
                    stdin,
                    wall_s=limits.wall_s + ENGINE_TIMEOUT_S,
                    output_bytes=limits.output_bytes,
                    cwd=folder,  # where Podman's monitor leaves a file `oom`
                )
                return await self._judged(name, ended, limits)
            finally:
                # Killing the client does not stop a daemon's container.
                if self.engine != "apptainer":
                    await remove(self.engine, name)

    async def _judged(self, name: str, ended: Ended, limits: Limits) -> SandboxResult:
        """The engine's record, which no program can write, tells its failures from a program's exit code."""
        ambiguous = ended.outcome is Outcome.EXITED and ended.exit_code in _NO_ANSWER
        if ambiguous and self.engine != "apptainer":
            asked = ("inspect", "--type", "container", "--format", "{{json .State}}", name)
            said = await call_engine(self.engine, *asked, check=False)
            state = json.loads(said.stdout) if said.ok else None
            if not isinstance(state, dict) or str(state.get("StartedAt", "0001")).startswith("0001"):
                raise SandboxError(f"{self.engine} could not start a container", found=ended.stderr[-500:])
            if state.get("OOMKilled"):
                return ended.result(Outcome.MEMORY_LIMIT)
        out_of_time = ended.exit_code in KILLED_BY_CLOCK and ended.wall_s >= limits.wall_s
        if out_of_time or ended.spent_processor_time(limits):
            return ended.result(Outcome.TIMEOUT)
        # Not every engine records it when the kernel killed for memory.
        return ended.result(Outcome.MEMORY_LIMIT if ambiguous and ended.exit_code == 137 else None)

    def command(self, name: str, argv: list[str], inputs: str, profile: str, limits: Limits) -> list[str]:
        """The full command line."""
        # The first process: everything else in the container ends with it.
        clock = ["timeout", "-s", "KILL", str(limits.wall_s)]
        launch = [*clock, "/bin/sh", "-c", _LAUNCH, "sh", *argv]
        if self.engine == "apptainer":
            return [
                *("apptainer", "--quiet", "exec", "--containall", "--cleanenv", "--no-home", "--no-privs"),
                *("--security", f"seccomp:{profile}"),
                *("--net", "--network", "none", "--bind", f"{inputs}:{INPUTS}:ro"),
                *("--scratch", WORK, "--pwd", WORK),
                *("--memory", str(limits.memory_bytes), "--pids-limit", str(limits.processes)),
                *(self.image, *launch),
            ]
        # runc before 1.2 gives a folder in memory the mode of the image's folder of that name, so the user owns it.
        owned = f"uid={USER_ID},gid={USER_ID}" if self.engine == "docker" else "U,notmpcopyup"
        folder = f"mode=1777,{owned},size={limits.scratch_bytes}"
        return [
            *(self.engine, "run", "--interactive", "--name", name, *isolation(self.engine, limits, profile)),
            *("--read-only", "--user", USER, "--workdir", WORK),
            *("--tmpfs", f"{WORK}:rw,exec,{folder}", "--tmpfs", f"/tmp:rw,{folder}"),
            *("--mount", f"type=bind,src={inputs},dst={INPUTS},readonly"),
            *("--env", f"HOME={WORK}", "--entrypoint", "", self.image, *launch),
        ]


async def check_engine(engine: str) -> None:
    """Raises UnsupportedError unless the engine is installed and answers."""
    if shutil.which(engine) is None:
        raise UnsupportedError(
            f"running in a container image needs `{engine}`, which is not installed",
            hints=(_HINTS[engine],),
        )
    arguments = ["version"] if engine == "apptainer" else ["info"]
    result = await call_engine(engine, *arguments, check=False)
    if not result.ok:
        raise UnsupportedError(
            f"`{engine}` is installed but does not work here",
            found=(result.stderr or result.stdout)[-300:],
            hints=(_HINTS[engine],),
        )


def isolation(engine: str, limits: Limits, profile: str) -> list[str]:
    """Arguments of Docker's and Podman's `run` that bound and close off a container. `profile`: a file of calls."""
    memory = str(limits.memory_bytes)
    docker_files = ["--ulimit", f"nofile={limits.open_files}"]
    return [
        *("--network", "none", "--ipc", "private", "--cgroupns", "private", "--cap-drop", "ALL"),
        *("--security-opt", "no-new-privileges", "--security-opt", f"seccomp={profile}"),
        *("--memory", memory, "--memory-swap", memory, "--pids-limit", str(limits.processes)),
        *(podman_ulimits(nofile=limits.open_files) if engine == "podman" else docker_files),
        *("--ulimit", f"fsize={limits.file_bytes}"),
        # At a core limit of 1 no crash reaches the host's crash handler, which 0 would not keep from it.
        *("--ulimit", "core=1:1", "--ulimit", f"cpu={limits.cpu_s}:{limits.cpu_s + 1}"),
        # The engine would write all output to the host's disk as well.
        *("--log-driver", "none", "--label", LABEL, "--pull", "missing"),
    ]


def podman_ulimits(*, nofile: int = 1_048_576) -> list[str]:
    """Arguments of `podman run`: as many files as given and processes as there may be, never above this process's own
    hard limits.

    What Podman takes by itself as root may be more than this process may grant, and then no container starts. nproc
    counts all processes of a user on the machine: `--pids-limit` bounds the container."""
    limits = {
        "nofile": (resource.RLIMIT_NOFILE, nofile),
        "nproc": (resource.RLIMIT_NPROC, int(Path("/proc/sys/kernel/pid_max").read_text())),
    }
    words = []
    for name, (number, value) in limits.items():
        hard = resource.getrlimit(number)[1]
        bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
        words += ["--ulimit", f"{name}={bound}:{bound}"]
    return words


async def remove(engine: str, name: str) -> None:
    """End a container and take it away, if there is one of this name."""
    # Its `rm` asks nicely first, and waits ten seconds for a first process that does not listen.
    if engine == "podman":
        await call_engine(engine, "kill", name, check=False)
    await call_engine(engine, "rm", "--force", name, check=False)


async def call_engine(engine: str, *arguments: str, check: bool = True) -> SandboxResult:
    """Run the engine's program to its end; SandboxError if it failed, where `check` asks."""
    with waiting(f"`{engine} {arguments[0]}`", ENGINE_TIMEOUT_S):
        ended = await run_process([engine, *arguments], b"", wall_s=ENGINE_TIMEOUT_S, output_bytes=1 << 20)
    result = ended.result()
    if check and not result.ok:
        raise SandboxError(
            f"`{engine} {arguments[0]}` failed ({result.outcome.value}, exit code {result.exit_code})",
            found=(result.stderr or result.stdout)[-500:],
        )
    return result
