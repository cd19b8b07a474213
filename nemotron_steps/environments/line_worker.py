"""Persistent helper processes that compute one JSON answer per JSON line, and end when they take too long.

For library code that may hang and cannot be interrupted in a thread (computer algebra). Not a sandbox: such code is
trusted, only its inputs are not. A worker dies with the process that started it, whatever it is doing, and has a limit
of memory, and of processor time for each answer, which the kernel keeps: what else the machine does changes nothing.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from nemotron_steps.errors import WorkerLostError
from nemotron_steps.waiting import waiting

LINE_LIMIT = 64 * 1024 * 1024
MEMORY_BYTES = 4 * 1024**3
"""Of address space: what an expression that grows without end may take before it counts as too long."""
OUT_OF_MEMORY = 86
"""Exit code of a worker that came to MEMORY_BYTES."""
WALL_FACTOR = 10
"""An answer may take so many times its processor time by the clock: for a worker that sleeps, or gets no processor."""
STARTING_S = 120.0
"""Until a worker has imported what it needs, on a busy machine."""
ENDING_S = 5.0
"""From a worker's last word to its end."""
PR_SET_PDEATHSIG = 1


FROM_OUTSIDE = frozenset({-signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP, -signal.SIGINT})
"""Exit codes of a worker that somebody ended, the kernel when the machine's memory is used up among them."""


class WorkerTimeoutError(Exception):
    """The worker used up its processor time or its memory over a request."""


class WorkerCrashedError(Exception):
    """The worker's own code ended it over a request."""


class WorkerPool:
    """Up to `size` processes running `python -m MODULE`, started when first needed.

    The module calls `serve`. One pool belongs to one event loop.

    Args:
        cpu_s: processor time of one answer. A worker's start does not count.
        imports: modules that a worker imports before its first answer.
    """

    def __init__(self, module: str, *, size: int, cpu_s: float, imports: Sequence[str] = ()) -> None:
        self._module = module
        self._cpu_s = cpu_s
        self._imports = imports
        self._free: list[asyncio.subprocess.Process] = []
        self._slots = asyncio.Semaphore(size)

    async def call(self, request: Any) -> Any:
        """Answer to one request."""
        data = json.dumps(request).encode() + b"\n"
        async with self._slots:
            process = self._free.pop() if self._free else await self._start()
            line = await self._line(process, WALL_FACTOR * self._cpu_s, data)
            if line.endswith(b"\n"):
                self._free.append(process)
                return json.loads(line)
            code = process.returncode
            if code in (OUT_OF_MEMORY, -signal.SIGPROF):
                raise WorkerTimeoutError("it used up its memory or its processor time")
            if code not in FROM_OUTSIDE:
                raise WorkerCrashedError(f"exit code {code}")
            raise self._lost("died", f"exit code {code}")

    async def close(self) -> None:
        """End the processes."""
        while self._free:
            await _kill(self._free.pop())

    async def _start(self) -> asyncio.subprocess.Process:
        """A worker that waits for its first request."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            self._module,
            str(os.getpid()),
            str(self._cpu_s),
            *self._imports,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=LINE_LIMIT,
            start_new_session=True,
        )
        if await self._line(process, STARTING_S) != b"\n":
            raise self._lost("died", f"exit code {process.returncode}")
        return process

    def _lost(self, what: str, found: str) -> WorkerLostError:
        return WorkerLostError(f"helper process {self._module} {what}", found=found)

    async def _line(self, process: asyncio.subprocess.Process, seconds: float, request: bytes = b"") -> bytes:
        """The next line that a worker writes; without its end, where the worker has ended. A silent one is killed."""
        assert process.stdin is not None and process.stdout is not None
        line = b""
        try:
            process.stdin.write(request)
            # Where the connection is lost it has ended: its exit code says how.
            with suppress(ConnectionError), waiting(f"helper process {self._module}", seconds):
                async with asyncio.timeout(seconds):
                    await process.stdin.drain()
                    line = await process.stdout.readline()
        except TimeoutError:
            await _kill(process)
            raise self._lost("did not answer" if request else "did not start", f"nothing in {seconds:g} s") from None
        except BaseException:
            await _kill(process)
            raise
        if not line.endswith(b"\n"):  # perhaps in the middle of its answer
            await _ended(process)
        return line


def serve(answer: Callable[[Any], Any]) -> None:
    """The worker's side: an empty line when it is ready, then answers to lines of standard input until it closes.

    Whatever the library prints goes to standard error, so it cannot be taken for an answer.
    """
    parent, seconds = int(sys.argv[1]), float(sys.argv[2])
    # By the kernel: a thread that watched a pipe would wait for the interpreter's lock, which one operation can hold.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return  # It died before this.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for module in sys.argv[3:]:
        importlib.import_module(module)
    channel.write("\n")
    channel.flush()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, seconds)  # past it the kernel ends the process with SIGPROF
        try:
            text = json.dumps(answer(json.loads(line)))
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        channel.write(text + "\n")
        channel.flush()


async def _ended(process: asyncio.subprocess.Process) -> None:
    """One that closed its output: killing it at once would take its exit code away from asyncio."""
    try:
        await asyncio.wait_for(process.wait(), ENDING_S)
    except TimeoutError:
        await _kill(process)


async def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()
