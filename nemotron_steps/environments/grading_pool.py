"""Graders that an answer could make slow, in persistent helper processes that are cut off.

A grader is a top-level function of JSON values that returns a JSON value. A thread would not do: Python code that
computes keeps the event loop waiting, and nothing can stop it. Not a sandbox: the grader is trusted, only its inputs
are not. A helper dies with the process that started it, whatever it is doing, and has a limit of memory, and of
processor time for each call, which the kernel keeps: what else the machine does changes nothing.
"""

import asyncio
import ctypes
import importlib
import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from nemotron_steps.environments.base import VERIFIER_CRASHED, VERIFIER_TIMEOUT, GraderFailedError
from nemotron_steps.errors import WorkerLostError
from nemotron_steps.waiting import waiting

LINE_LIMIT = 64 * 1024 * 1024
MEMORY_BYTES = 4 * 1024**3
"""Of address space: what an expression that grows without end may take before it counts as too long."""
OUT_OF_MEMORY = 86
WALL_FACTOR = 10
"""A call may take so many times its processor time by the clock: for a helper that sleeps, or gets no processor."""
STARTING_S = 120.0
ENDING_S = 5.0
FROM_OUTSIDE = frozenset({-signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP, -signal.SIGINT})
"""Exit codes of a helper that somebody ended, the kernel when the machine's memory is used up among them."""
PR_SET_PDEATHSIG = 1


class GradingPool:
    """Calls of one grader, a function that can be imported by its name. One pool belongs to one event loop.

    Args:
        size: helper processes; each is started when first needed.
        cpu_s: seconds of processor time of one call; a helper's start does not count.
    """

    def __init__(self, grade: Callable[..., Any], *, size: int = 2, cpu_s: float = 10.0) -> None:
        self._name = f"{grade.__module__}:{grade.__qualname__}"
        self._cpu_s = cpu_s
        self._free: list[asyncio.subprocess.Process] = []
        self._slots = asyncio.Semaphore(size)

    async def call(self, *arguments: Any) -> Any:
        """What the grader returns.

        GraderFailedError: it did not end in time, or raised, or ended its process. WorkerLostError: the process did not
        start, was killed, or did not answer in WALL_FACTOR times cpu_s.
        """
        data = json.dumps(arguments).encode() + b"\n"
        async with self._slots:
            process = self._free.pop() if self._free else await self._start()
            line = await self._line(process, WALL_FACTOR * self._cpu_s, data)
            if not line.endswith(b"\n"):
                raise self._ended(process.returncode)
            self._free.append(process)
        reply = json.loads(line)
        if "error" in reply:
            raise GraderFailedError(VERIFIER_CRASHED, f"{self._name}: {reply['error']}")
        return reply["value"]

    async def close(self) -> None:
        while self._free:
            await _kill(self._free.pop())

    async def _start(self) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "nemotron_steps.environments.grading_pool"),
            *(str(os.getpid()), str(self._cpu_s), self._name),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=LINE_LIMIT,
            start_new_session=True,
        )
        if await self._line(process, STARTING_S) != b"\n":
            raise self._lost("died", f"exit code {process.returncode}")
        return process

    def _ended(self, code: int | None) -> Exception:
        """What became of a helper that has ended over a call."""
        if code in (OUT_OF_MEMORY, -signal.SIGPROF):
            used_up = "memory" if code == OUT_OF_MEMORY else "processor time"
            return GraderFailedError(VERIFIER_TIMEOUT, f"{self._name}: it used up its {used_up}")
        if code not in FROM_OUTSIDE:
            return GraderFailedError(VERIFIER_CRASHED, f"{self._name}: exit code {code}")
        return self._lost("died", f"exit code {code}")

    def _lost(self, what: str, found: str) -> WorkerLostError:
        return WorkerLostError(f"the helper process of {self._name} {what}", found=found)

    async def _line(self, process: asyncio.subprocess.Process, seconds: float, request: bytes = b"") -> bytes:
        """The next line that a helper writes; without its end, where the helper has ended. A silent one is killed."""
        assert process.stdin is not None and process.stdout is not None
        line = b""
        try:
            process.stdin.write(request)
            # Where the connection is lost it has ended: its exit code says how.
            with suppress(ConnectionError), waiting(f"helper process of {self._name}", seconds):
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
            with suppress(TimeoutError):  # killing it at once would take its exit code away from asyncio
                await asyncio.wait_for(process.wait(), ENDING_S)
            await _kill(process)
        return line


async def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()


def serve(parent: int, seconds: float, name: str) -> None:
    """The helper's side: an empty line when it is ready, then answers to lines of standard input until it closes.

    Whatever the grader prints goes to standard error, so it cannot be taken for an answer.
    """
    # By the kernel: a thread that watched a pipe would wait for the interpreter's lock, which one operation can hold.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return  # It died before this.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    module, _, function = name.partition(":")
    grade = getattr(importlib.import_module(module), function)
    channel.write("\n")
    channel.flush()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, seconds)  # past it the kernel ends the process with SIGPROF
        try:
            reply = json.dumps({"value": grade(*json.loads(line))})
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        except Exception:
            reply = json.dumps({"error": traceback.format_exc(limit=-2)[-1000:]})
        channel.write(reply + "\n")
        channel.flush()


if __name__ == "__main__":
    serve(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3])
