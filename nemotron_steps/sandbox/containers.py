"""Docker, Podman and Apptainer, through their command lines: for programs that need an image, such as a repository
with its dependencies.

ContainerSandbox runs one program in a fresh container. ContainerSession keeps one container of an image alive over
many commands (a repository an agent edits). Neither has a network, capabilities, a way to gain privileges or more
system calls than `seccomp.container_profile` lists; memory and processes are bounded by the engine's cgroup.

Nothing keeps running when this process is killed: one program has a clock of its own inside, and a session's container
lives as long as the pipe to it is open.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from nemotron_steps.errors import SandboxError, UnsupportedError
from nemotron_steps.sandbox.base import Limits, Outcome, Sandbox, SandboxResult, encoded
from nemotron_steps.sandbox.probe import probe
from nemotron_steps.sandbox.process import Ended, run_process
from nemotron_steps.sandbox.seccomp import container_profile

Engine = Literal["docker", "podman", "apptainer"]
ENGINES: tuple[Engine, ...] = ("docker", "podman", "apptainer")

WORK = "/scratch"
INPUTS = "/inputs"
USER = "65534:65534"
LABEL = "nemotron-steps"
ENGINE_TIMEOUT_S = 120.0
"""For the engine's own work (starting, copying, removing), not for the program."""

_HINTS: dict[str, str] = {
    "docker": "https://docs.docker.com/engine/install, then: docker info",
    "podman": "apt-get install -y podman",
    "apptainer": "https://apptainer.org/docs/admin/main/installation.html, then: apptainer version",
}
_LAUNCH = f'cp -r {INPUTS}/. . && exec "$@"'
_NO_ANSWER = frozenset({125, 126, 127, 137})
"""Exit codes that the engine gives for failures of its own, or of the kernel's memory killer, and any program can."""


class ContainerSandbox(Sandbox):
    """One fresh container a run.

    Args:
        engine: docker, podman or apptainer.
        image: image name, or .sif path or URL for apptainer. It needs /bin/sh, cp, timeout and, for `code`, a Python.
        python: the interpreter inside the image.
    """

    def __init__(
        self, engine: Engine, image: str, *, python: str = "python3", max_concurrency: int | None = None
    ) -> None:
        super().__init__(max_concurrency)
        self.engine = engine
        self.image = image
        self._python = python

    @property
    def python(self) -> str:
        """See Sandbox.python."""
        return self._python

    async def probe(self) -> None:
        """See Sandbox.probe. The image's own files are the program's to read; the host's are not."""
        await check_engine(self.engine)
        await probe(self, hidden_memory=False)

    async def execute(self, argv: list[str], stdin: bytes, files: Mapping[str, bytes], limits: Limits) -> SandboxResult:
        """See Sandbox.execute."""
        name = f"steps-sandbox-{secrets.token_hex(8)}"
        with tempfile.TemporaryDirectory(prefix="sandbox-") as folder:
            inputs, profile = Path(folder) / "inputs", Path(folder) / "seccomp.json"
            _lay_files(inputs, files)
            profile.write_text(json.dumps(container_profile(session=False)))
            try:
                ended = await run_process(
                    self.command(name, argv, str(inputs), str(profile), limits),
                    stdin,
                    wall_s=limits.wall_s,
                    output_bytes=limits.output_bytes,
                )
                return await self._judged(name, ended, limits)
            finally:
                # Killing the client does not stop a daemon's container.
                if self.engine != "apptainer":
                    await _engine(self.engine, "rm", "--force", name, check=False)

    async def _judged(self, name: str, ended: Ended, limits: Limits) -> SandboxResult:
        """The engine's record, which no program can write, tells its failures from a program's exit code."""
        ambiguous = ended.outcome is Outcome.EXITED and ended.exit_code in _NO_ANSWER
        if ambiguous and self.engine != "apptainer":
            state = await _state(self.engine, name)
            if not state or str(state.get("StartedAt", "0001")).startswith("0001"):
                raise SandboxError(f"{self.engine} could not start a container", found=ended.stderr[-500:])
            if state.get("OOMKilled"):
                return ended.result(Outcome.MEMORY_LIMIT)
        if ended.spent_processor_time(limits):
            return ended.result(Outcome.TIMEOUT)
        # Not every engine records it when the kernel killed for memory.
        return ended.result(Outcome.MEMORY_LIMIT if ambiguous and ended.exit_code == 137 else None)

    def command(self, name: str, argv: list[str], inputs: str, profile: str, limits: Limits) -> list[str]:
        """The full command line."""
        # Outlives the clock outside, unless there is nobody left to keep that one.
        clock = ["timeout", "-s", "KILL", str(limits.wall_s + ENGINE_TIMEOUT_S)]
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
        return [
            *(self.engine, "run", "--interactive", "--name", name, *_isolation(limits, profile)),
            *("--read-only", "--user", USER, "--workdir", WORK),
            *("--tmpfs", f"{WORK}:rw,exec,mode=1777,size={limits.scratch_bytes}"),
            *("--tmpfs", f"/tmp:rw,mode=1777,size={limits.scratch_bytes}"),
            *("--mount", f"type=bind,src={inputs},dst={INPUTS},readonly"),
            *("--env", f"HOME={WORK}", "--entrypoint", "", self.image, *launch),
        ]


class ContainerSession:
    """A container of an image, alive from `async with` to its end; commands see each other's changes.

    Docker and Podman only: Apptainer has no daemon to hold a network-less instance without root.
    """

    def __init__(self, engine: Literal["docker", "podman"], image: str, *, limits: Limits | None = None) -> None:
        self.engine = engine
        self.image = image
        self.limits = limits or Limits()
        self.name = f"steps-session-{secrets.token_hex(8)}"
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> ContainerSession:
        await check_engine(self.engine)
        async with AsyncExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="session-"))
            profile = Path(folder) / "seccomp.json"
            profile.write_text(json.dumps(container_profile(session=True)))
            client = await asyncio.create_subprocess_exec(
                self.engine,
                *self.start_arguments(str(profile)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
            stack.push_async_callback(self._stop, client)
            assert client.stdout is not None and client.stderr is not None
            try:
                first = await asyncio.wait_for(client.stdout.readline(), ENGINE_TIMEOUT_S)
            except TimeoutError:
                first = b""
            if first.strip() != b"ready":
                with suppress(ProcessLookupError):
                    client.kill()
                # Docker ends what it says with advice to read its help.
                lines = (await client.stderr.read()).decode(errors="replace").strip().splitlines()
                said = [line for line in lines if line.strip() and "--help" not in line] or lines
                raise SandboxError(
                    f"{self.engine} could not start a container of {self.image}",
                    found=said[-1][-500:] if said else f"no answer in {ENGINE_TIMEOUT_S:.0f} s",
                    hints=(f"{self.engine} pull {self.image}",),
                )
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def _stop(self, client: asyncio.subprocess.Process) -> None:
        await _engine(self.engine, "rm", "--force", self.name, check=False)
        with suppress(ProcessLookupError):
            client.kill()
        await client.communicate()

    def start_arguments(self, profile: str) -> list[str]:
        """Arguments of the engine that start the container. It ends when its input does; commands are run beside it."""
        return [
            *("run", "--rm", "--interactive", "--name", self.name, *_isolation(self.limits, profile)),
            *("--entrypoint", "/bin/sh", self.image, "-c", "echo ready && exec cat > /dev/null"),
        ]

    async def run(
        self, argv: Sequence[str], *, cwd: str | None = None, stdin: str = "", wall_s: float | None = None
    ) -> SandboxResult:
        """Run a command in the container. On a time-out its whole process tree inside is killed."""
        place = ["--workdir", cwd] if cwd else []
        wall = self.limits.wall_s if wall_s is None else wall_s
        # `timeout` ends the program inside; the outer clock only guards against the engine itself hanging.
        inner = ["timeout", "-s", "KILL", str(wall), *argv]
        ended = await run_process(
            [self.engine, "exec", "--interactive", *place, self.name, *inner],
            encoded(stdin),
            wall_s=wall + ENGINE_TIMEOUT_S,
            output_bytes=self.limits.output_bytes,
        )
        if ended.exit_code in (124, 137) and ended.wall_s >= wall:
            return ended.result(Outcome.TIMEOUT)
        return ended.result()

    async def write(self, files: Mapping[str, str]) -> None:
        """See SandboxSession.write."""
        for path, content in files.items():
            script = 'mkdir -p "$(dirname "$1")" && cat > "$1"'
            result = await self.run(["/bin/sh", "-c", script, "sh", path], stdin=content)
            if not result.ok:
                raise SandboxError(f"could not write {path} in the container", found=result.stderr[-500:])


async def check_engine(engine: str) -> None:
    """Raises UnsupportedError unless the engine is installed and answers."""
    if shutil.which(engine) is None:
        raise UnsupportedError(
            f"running in a container image needs `{engine}`, which is not installed",
            expected=f"`{engine}` on PATH",
            hints=(_HINTS[engine],),
        )
    arguments = ["version"] if engine == "apptainer" else ["info"]
    result = await _engine(engine, *arguments, check=False)
    if not result.ok:
        raise UnsupportedError(
            f"`{engine}` is installed but does not work here",
            expected=f"`{engine} {arguments[0]}` succeeds",
            found=(result.stderr or result.stdout)[-300:],
            hints=(_HINTS[engine],),
        )


def _isolation(limits: Limits, profile: str) -> list[str]:
    memory = str(limits.memory_bytes)
    return [
        *("--network", "none", "--ipc", "private", "--cgroupns", "private", "--cap-drop", "ALL"),
        *("--security-opt", "no-new-privileges", "--security-opt", f"seccomp={profile}"),
        *("--memory", memory, "--memory-swap", memory, "--pids-limit", str(limits.processes)),
        *("--ulimit", f"fsize={limits.file_bytes}", "--ulimit", f"nofile={limits.open_files}"),
        # At a core limit of 1 no crash reaches the host's crash handler, which 0 would not keep from it.
        *("--ulimit", "core=1:1", "--ulimit", f"cpu={limits.cpu_s}:{limits.cpu_s + 1}"),
        # The engine would write all output to the host's disk as well.
        *("--log-driver", "none", "--label", LABEL, "--pull", "missing"),
    ]


async def _state(engine: str, name: str) -> dict[str, Any]:
    """The engine's record of how a container ran, empty if it has none."""
    result = await _engine(engine, "inspect", "--type", "container", "--format", "{{json .State}}", name, check=False)
    state = json.loads(result.stdout) if result.ok else {}
    return state if isinstance(state, dict) else {}


async def _engine(engine: str, *arguments: str, check: bool = True) -> SandboxResult:
    ended = await run_process([engine, *arguments], b"", wall_s=ENGINE_TIMEOUT_S, output_bytes=1 << 20)
    result = ended.result()
    if check and not result.ok:
        raise SandboxError(
            f"`{engine} {arguments[0]}` failed ({result.outcome.value}, exit code {result.exit_code})",
            found=(result.stderr or result.stdout)[-500:],
        )
    return result


def _lay_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write them under `folder`, readable to whoever the program runs as; the folder around it is private."""
    folder.mkdir()
    folder.chmod(0o755)
    for path, content in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
