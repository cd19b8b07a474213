"""An Apptainer image that stays: one `apptainer exec` over many commands, its server on the program's own input and
output. An instance without a network would need root.

The image needs a Python (`python3`) for the server. Changes lie in memory (`--writable-tmpfs`) and go with the session.
The probe of the sandbox is not passed: the isolation is what the installation grants to these options.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Self

from nemotron_steps.errors import SandboxError
from nemotron_steps.sandbox.base import Limits, Outcome, SandboxResult
from nemotron_steps.sandbox.command_server import COMMAND_SERVER
from nemotron_steps.sandbox.containers import ENGINE_TIMEOUT_S, check_engine
from nemotron_steps.sandbox.process import gone, let_go
from nemotron_steps.sandbox.seccomp import container_profile
from nemotron_steps.sandbox.served_session import LINE_BYTES, ServedSession

STDERR_BYTES = 4096
KILLED = 137
"""Exit code of a container that the kernel's memory killer ended."""


class ApptainerSession(ServedSession):
    """See the module docstring.

    Args:
        image: a .sif path or a URL.
        slots: commands at once, of all sessions that share it.
    """

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
            profile = Path(folder, "seccomp.json")
            profile.write_text(json.dumps(container_profile(session=True)))
            process = await asyncio.create_subprocess_exec(
                *self.arguments(str(profile)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=LINE_BYTES,
                start_new_session=True,
            )
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
                await asyncio.wait([said], timeout=1.0)
                await let_go(process)
        text = await said
        seconds = asyncio.get_running_loop().time() - begun
        return SandboxResult(outcome, process.returncode if outcome is Outcome.EXITED else None, "", text, seconds)


async def _last(stream: asyncio.StreamReader) -> str:
    """The end of what is written to a stream."""
    kept = b""
    while chunk := await stream.read(STDERR_BYTES):
        kept = (kept + chunk)[-STDERR_BYTES:]
    return kept.decode(errors="replace")
