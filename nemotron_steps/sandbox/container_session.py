"""Sessions of images, in which an agent edits a repository or a task's tests run: Docker's, Podman's, Apptainer's."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from nemotron_steps.errors import SandboxError
from nemotron_steps.sandbox.base import Limits, Outcome, SandboxResult, encoded
from nemotron_steps.sandbox.command_server import COMMAND_SERVER
from nemotron_steps.sandbox.containers import (
    ENGINE_TIMEOUT_S,
    KILLED_BY_CLOCK,
    call_engine,
    check_engine,
    isolation,
    remove,
)
from nemotron_steps.sandbox.process import CHUNK, gone, let_go, run_process
from nemotron_steps.sandbox.seccomp import container_profile
from nemotron_steps.sandbox.session import LINE_BYTES, ServedSession, SessionOverError

LAST_WORDS_S = 1.0
"""To read what the engine said before it was killed."""
STDERR_BYTES = 4096
KILLED = 137
"""Exit code of a container that the kernel's memory killer ended."""
Engine = Literal["docker", "podman"]
KEEPER = "65533:65533"
_KEEP = "echo ready && cat > /dev/null; exit 0"
"""Not `exec cat`: a shell that waits for one child collects all others."""
_END_ALL = """kill -9 -1
for look in 0 1 2 3 4 5 6 7 8 9 a b c d e f; do
    left=
    for process in /proc/[0-9]*; do
        process=${process#/proc/}
        case $process in 1 | $$) continue ;; esac
        kill -9 "$process" 2> /dev/null && left=yes
    done
    [ "$left" ] || exit 0
    sleep 0.1
done"""
"""All processes of the commands' user but this one; it ends when they are gone."""


class ContainerSession:
    """A container of Docker's or Podman's, alive from `async with` to its end.

    Its first process, of a user that no command runs as, holds it for as long as the pipe to it is open, so nothing
    keeps running when this process is killed, and collects the processes that commands leave behind. Commands run
    beside it as the image's own user, without capabilities: they can end each other and not the container.

    The image needs /bin/sh, timeout, cat, dirname and mkdir. `limits.wall_s` is a command's; `session_s` of the whole
    session, None for no bound."""

    def __init__(
        self, engine: Engine, image: str, *, limits: Limits | None = None, session_s: float | None = None
    ) -> None:
        self.engine = engine
        self.image = image
        self.limits = limits or Limits()
        self.name = f"steps-session-{secrets.token_hex(8)}"
        self._session_s = session_s
        self._ends_at = float("inf")
        self._client: asyncio.subprocess.Process | None = None
        """The engine's, whose input holds the container."""
        self._as_image: list[str] = []
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> ContainerSession:
        await check_engine(self.engine)
        async with AsyncExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="session-"))
            # Podman's monitor leaves a file `oom` in its working directory.
            client = await _begun([self.engine, *self.start_arguments(_profile(folder))], cwd=folder)
            stack.push_async_callback(self._stop, client)
            assert client.stdout is not None and client.stderr is not None
            # Nothing, where the engine's program ends, or its time, before there is a line.
            line, end = asyncio.ensure_future(client.stdout.readline()), asyncio.ensure_future(gone(client))
            try:
                await asyncio.wait([line, end], timeout=ENGINE_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
                is_ready = line.done() and line.result().strip() == b"ready"
            finally:
                line.cancel()
                end.cancel()
            if not is_ready:
                last = asyncio.ensure_future(_last(client.stderr))
                _kill(client)
                await gone(client)
                await asyncio.wait([last], timeout=LAST_WORDS_S)  # what has left its group may hold the pipe open
                await let_go(client)
                # Docker ends what it says with advice to read its help.
                lines = (await last).strip().splitlines()
                told = [line for line in lines if line.strip() and "--help" not in line] or lines
                raise SandboxError(
                    f"{self.engine} could not start a container of {self.image}",
                    found=told[-1][-500:] if told else f"no answer in {ENGINE_TIMEOUT_S:.0f} s",
                    hints=(f"{self.engine} pull {self.image}",),
                )
            # Commands are the image's own: its user and its working folder.
            said = await call_engine(self.engine, "image", "inspect", "--format", "{{json .Config}}", self.image)
            config: dict[str, Any] = json.loads(said.stdout) or {}
            user, folder = config.get("User") or "0", config.get("WorkingDir") or "/"
            self._as_image = ["--user", user, "--workdir", folder]
            self._client = client
            if self._session_s is not None:
                self._ends_at = time.monotonic() + self._session_s
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def _stop(self, client: asyncio.subprocess.Process) -> None:
        await remove(self.engine, self.name)
        _kill(client)
        await gone(client)
        await let_go(client)

    def start_arguments(self, profile: str) -> list[str]:
        """Arguments of the engine that start the container. It ends when its input does; commands are run beside it."""
        return [
            *("run", "--rm", "--interactive", "--name", self.name),
            *isolation(self.engine, self.limits, profile),
            *("--user", KEEPER, "--workdir", "/", "--entrypoint", "/bin/sh", self.image, "-c", _KEEP),
        ]

    async def run(
        self, argv: Sequence[str], *, cwd: str | None = None, stdin: str = "", wall_s: float | None = None
    ) -> SandboxResult:
        """See ServedSession.run. What a command leaves running goes on, unless it is given up, or stopped for its time
        or output: then everything that commands have started is."""
        left = self._ends_at - time.monotonic()
        if left <= 0:
            raise SessionOverError(Outcome.TIMEOUT)
        wall = min(self.limits.wall_s if wall_s is None else wall_s, left)
        place = ["--workdir", cwd] if cwd else []
        # `timeout` ends the program inside; the outer clock only guards against the engine itself hanging.
        inner = ["timeout", "-s", "KILL", str(wall), *argv]
        try:
            ended = await run_process(
                [self.engine, "exec", "--interactive", *self._as_image, *place, self.name, *inner],
                encoded(stdin),
                wall_s=wall + ENGINE_TIMEOUT_S,
                output_bytes=self.limits.output_bytes,
            )
        except asyncio.CancelledError:
            await self._end_all()  # the engine's program is dead, what it had begun inside is not
            raise
        if self._client is not None and self._client.returncode is not None:
            raise SessionOverError(Outcome.EXITED)
        result = ended.result()
        if ended.exit_code in KILLED_BY_CLOCK and ended.wall_s >= wall:
            result = ended.result(Outcome.TIMEOUT)
        if result.outcome is not Outcome.EXITED:
            await self._end_all()
            if time.monotonic() >= self._ends_at:
                raise SessionOverError(Outcome.TIMEOUT)
        return result

    async def _end_all(self) -> None:
        """Kill whatever commands have started and left."""
        await call_engine(self.engine, "exec", *self._as_image, self.name, "/bin/sh", "-c", _END_ALL, check=False)

    async def write(self, files: Mapping[str, str]) -> None:
        """See ServedSession.write."""
        for path, content in files.items():
            script = 'mkdir -p "$(dirname "$1")" && cat > "$1"'
            result = await self.run(["/bin/sh", "-c", script, "sh", path], stdin=content)
            if not result.ok:
                raise SandboxError(f"could not write {path} in the container", found=result.stderr[-500:])


class ApptainerSession(ServedSession):
    """An Apptainer image (a .sif path or a URL) that stays: one `apptainer exec` over many commands, its server on the
    program's own input and output. An instance without a network would need root.

    The image needs a Python (`python3`) for the server. Changes lie in memory (`--writable-tmpfs`) and go with the
    session. The probe of the sandbox is not passed: the isolation is what the installation grants to these options."""

    _clock: asyncio.Timeout
    """Of Apptainer's own start, then of the session's time."""

    def __init__(
        self, image: str, slots: asyncio.Semaphore, *, limits: Limits | None = None, command_s: float | None = None
    ) -> None:
        super().__init__(limits or Limits(), slots, "/", command_s)
        self.image = image

    def arguments(self, profile: str) -> list[str]:
        """The full command line."""
        limits = self.limits
        return [
            *("apptainer", "--quiet", "exec", "--containall", "--cleanenv", "--no-home", "--no-privs"),
            *("--security", f"seccomp:{profile}", "--net", "--network", "none", "--writable-tmpfs"),
            *("--memory", str(limits.memory_bytes), "--pids-limit", str(limits.processes)),
            # Ends it where this process is killed and its input stays open.
            *(self.image, "timeout", "-s", "KILL", str(limits.wall_s + ENGINE_TIMEOUT_S)),
            *("python3", "-I", "-c", COMMAND_SERVER, "0", "1", "together"),
        ]

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        # An image may have to be fetched and unpacked: the session's time begins with its first answer.
        with suppress(RuntimeError):  # it is over already
            self._clock.reschedule(asyncio.get_running_loop().time() + self.limits.wall_s)
        return self

    async def _begin(self) -> None:
        await check_engine("apptainer")
        ready, self._clock = asyncio.Event(), asyncio.timeout(ENGINE_TIMEOUT_S)
        self._whole = asyncio.ensure_future(self._hold(ready))
        waiting = asyncio.ensure_future(ready.wait())
        await asyncio.wait([waiting, self._whole], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if not ready.is_set():
            raise SandboxError(
                "apptainer could not be started", where=self.image[:200], found=str(self._whole.exception())
            )

    async def _hold(self, ready: asyncio.Event) -> SandboxResult:
        """The session's process to its end."""
        begun = asyncio.get_running_loop().time()
        with tempfile.TemporaryDirectory(prefix="session-") as folder:
            process = await _begun(self.arguments(_profile(folder)), line=LINE_BYTES)
            assert process.stderr is not None
            self._reader, self._writer = process.stdout, process.stdin
            said = asyncio.ensure_future(_last(process.stderr))
            ready.set()
            outcome = Outcome.EXITED
            try:
                async with self._clock:
                    code = await gone(process)
                outcome = Outcome.MEMORY_LIMIT if code in (KILLED, -9) else Outcome.EXITED
            except TimeoutError:
                outcome = Outcome.TIMEOUT
            finally:
                # All of it: what Apptainer has started need not end with the process that was started here.
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await gone(process)
                await asyncio.wait([said], timeout=LAST_WORDS_S)
                await let_go(process)
        text = await said
        seconds = asyncio.get_running_loop().time() - begun
        return SandboxResult(outcome, process.returncode if outcome is Outcome.EXITED else None, "", text, seconds)


SandboxSession = ServedSession | ContainerSession
"""A sandbox over many commands: `async with` starts it, and ends everything in it."""


def _profile(folder: str) -> str:
    """The path of a file with the system calls that a session may make."""
    profile = Path(folder, "seccomp.json")
    profile.write_text(json.dumps(container_profile(session=True)))
    return str(profile)


async def _begun(words: Sequence[str], cwd: str | None = None, line: int = CHUNK) -> asyncio.subprocess.Process:
    """An engine's program, in a process group of its own; `line`: the longest that is read of it."""
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        *words, stdin=pipe, stdout=pipe, stderr=pipe, limit=line, start_new_session=True, cwd=cwd
    )


def _kill(client: asyncio.subprocess.Process) -> None:
    """Kill the engine's program, with what it may have started."""
    if client.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(client.pid, signal.SIGKILL)


async def _last(stream: asyncio.StreamReader) -> str:
    """The end of what is written to a stream."""
    kept = b""
    while chunk := await stream.read(STDERR_BYTES):
        kept = (kept + chunk)[-STDERR_BYTES:]
    return kept.decode(errors="replace")
