"""A container of an image that stays: a repository that an agent edits, or that a task's tests run in.

Its first process, of a user that no command runs as, holds it for as long as the pipe to it is open, so nothing keeps
running when this process is killed, and collects the processes that commands leave behind. Commands run beside it as
the image's own user, without capabilities: they can end each other and not the container.
"""

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
from typing import Any, Literal

from nemotron_steps.errors import SandboxError
from nemotron_steps.sandbox.base import Limits, Outcome, SandboxResult, encoded
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
from nemotron_steps.sandbox.session import SessionOverError

LAST_WORDS_S = 1.0
"""To read what the engine said before it was killed."""
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
    """A container of an image, alive from `async with` to its end; commands see each other's changes.

    Docker and Podman only: Apptainer has no daemon to hold a network-less instance without root.

    Args:
        image: needs /bin/sh, timeout, cat, dirname and mkdir.
        limits: `wall_s` is a command's, where `run` is not told.
        session_s: seconds of the whole session; None: no bound.
    """

    def __init__(
        self,
        engine: Literal["docker", "podman"],
        image: str,
        *,
        limits: Limits | None = None,
        session_s: float | None = None,
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
            profile = Path(folder) / "seccomp.json"
            profile.write_text(json.dumps(container_profile(session=True)))
            client = await asyncio.create_subprocess_exec(
                self.engine,
                *self.start_arguments(str(profile)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
                cwd=folder,  # where Podman's monitor leaves a file `oom`
            )
            stack.push_async_callback(self._stop, client)
            assert client.stdout is not None and client.stderr is not None
            if (await _first_line(client, client.stdout)).strip() != b"ready":
                _kill(client)
                # Docker ends what it says with advice to read its help.
                lines = (await _rest(client.stderr)).decode(errors="replace").strip().splitlines()
                said = [line for line in lines if line.strip() and "--help" not in line] or lines
                raise SandboxError(
                    f"{self.engine} could not start a container of {self.image}",
                    found=said[-1][-500:] if said else f"no answer in {ENGINE_TIMEOUT_S:.0f} s",
                    hints=(f"{self.engine} pull {self.image}",),
                )
            self._as_image = await self._image_user()
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

    async def _image_user(self) -> list[str]:
        """Arguments of `exec` that make a command the image's own: its user and its working folder."""
        said = await call_engine(self.engine, "image", "inspect", "--format", "{{json .Config}}", self.image)
        config: dict[str, Any] = json.loads(said.stdout) or {}
        return ["--user", config.get("User") or "0", "--workdir", config.get("WorkingDir") or "/"]

    async def run(
        self, argv: Sequence[str], *, cwd: str | None = None, stdin: str = "", wall_s: float | None = None
    ) -> SandboxResult:
        """See SandboxSession.run. What a command leaves running goes on, unless it is given up, or stopped for its time
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
        """See SandboxSession.write."""
        for path, content in files.items():
            script = 'mkdir -p "$(dirname "$1")" && cat > "$1"'
            result = await self.run(["/bin/sh", "-c", script, "sh", path], stdin=content)
            if not result.ok:
                raise SandboxError(f"could not write {path} in the container", found=result.stderr[-500:])


def _kill(client: asyncio.subprocess.Process) -> None:
    """Kill the engine's program, with what it may have started."""
    if client.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(client.pid, signal.SIGKILL)


async def _first_line(client: asyncio.subprocess.Process, stream: asyncio.StreamReader) -> bytes:
    """Empty where the engine's program ends, or its time, before there is one."""
    line, end = asyncio.ensure_future(stream.readline()), asyncio.ensure_future(gone(client))
    try:
        await asyncio.wait([line, end], timeout=ENGINE_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        return line.result() if line.done() else b""
    finally:
        line.cancel()
        end.cancel()


async def _rest(stream: asyncio.StreamReader) -> bytes:
    """What was written, by a program that is dead: what has left its group may hold the pipe open."""
    said = b""
    with suppress(TimeoutError):
        async with asyncio.timeout(LAST_WORDS_S):
            while part := await stream.read(CHUNK):
                said += part
    return said
