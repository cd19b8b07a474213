"""Run a host process to its end under a wall clock, an output cap and a memory watch, and leave nothing behind; not a
sandbox by itself. Each run has a thread of its own: a busy event loop delays neither the clock nor the memory watch,
and a process that the kernel kills with its parent is tied to the thread that started it."""

import asyncio
import json
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from typing import IO, Any

from nemotron_steps.sandbox.base import Limits, Outcome, SandboxResult
from nemotron_steps.sandbox.memory import TreeMemory

CHUNK = 65536
CLOSED = object()
"""What a handler returns when its descriptor is done with."""
READY = b"ready"
"""What a launcher writes to the status channel before it turns into the program, and closes the channel."""
SETUP_S = 60.0
"""For everything before READY."""
DRAIN_S = 10.0
"""For the pipes to close, and a sandbox's first process to be gone, once everything was killed."""
FILL_BYTES_PER_S = 4 * 1024**3
"""How fast a core can fill memory: the watch looks again before what is left could be used up."""
SHORTEST_WATCH_S, LONGEST_WATCH_S = 0.01, 0.1
RESTING_WATCH_S = 1.0


class Rest:
    """Whether a run that stays has nothing to do: of hundreds that wait for policies memory is looked at seldom."""

    def __init__(self) -> None:
        self.resting = False
        self.over = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        """Readable once the rest is over."""

    def begin(self) -> None:
        """Nothing runs that could take memory."""
        self.resting = True

    def end(self) -> None:
        """Something is about to run."""
        self.resting = False
        if self.over >= 0:
            os.eventfd_write(self.over, 1)

    def close(self) -> None:
        """Once nobody watches the run."""
        os.close(self.over)
        self.over = -1


@dataclass(frozen=True)
class Watch:
    """How one run is told about and bounded, beside its clock and output."""

    status: int
    """The reading end of the channel on which bubblewrap tells its first process and the launcher says READY."""
    memory_bytes: int | None
    """Bound of the tree's memory, None where the kernel keeps it."""
    folders: tuple[str, ...]
    rest: Rest | None = None


@dataclass(frozen=True)
class Ended:
    """How a run ended."""

    outcome: Outcome
    exit_code: int
    stdout: str
    stderr: str
    wall_s: float
    ready: bool
    """Whether the program was reached. Without a Watch it is not known, and True."""

    def result(self, outcome: Outcome | None = None) -> SandboxResult:
        """What callers of the sandbox see."""
        outcome = outcome or self.outcome
        code = self.exit_code if outcome is Outcome.EXITED else None
        return SandboxResult(outcome, code, self.stdout, self.stderr, self.wall_s)

    def spent_processor_time(self, limits: Limits) -> bool:
        """Killed by SIGXCPU, or by SIGKILL because that was ignored. A program can pretend it, and gains nothing."""
        if self.outcome is not Outcome.EXITED:
            return False
        killed = self.exit_code == 128 + signal.SIGKILL and self.wall_s >= limits.cpu_s
        return killed or self.exit_code == 128 + signal.SIGXCPU


async def run_process(
    argv: Sequence[str],
    stdin: bytes,
    *,
    wall_s: float,
    output_bytes: int,
    environment: dict[str, str] | None = None,
    cwd: str | None = None,
    pass_fds: Sequence[int] = (),
    watch: Watch | None = None,
) -> Ended:
    """Run argv in its own session, whose processes are killed at the end. `wall_s` counts from when it is ready."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Ended] = loop.create_future()
    stop = os.eventfd(0)
    done.add_done_callback(lambda _: os.close(stop))

    def whole() -> Ended:
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        options: dict[str, Any] = {"env": environment, "cwd": cwd, "pass_fds": pass_fds, **pipes}
        with ExitStack() as stack:
            process = subprocess.Popen(argv, bufsize=0, start_new_session=True, **options)
            stack.callback(_kill, process)
            for stream in (process.stdin, process.stdout, process.stderr):
                assert stream is not None
                os.set_blocking(stream.fileno(), False)
                stack.callback(stream.close)
            run = stack.enter_context(closing(_Run(process, stdin, wall_s, output_bytes, watch, stop)))
            outcome = run.until_over()
            seconds = time.monotonic() - run.begin
            _kill(process)
            run.drain()
            if outcome is Outcome.EXITED and run.overflow:
                outcome = Outcome.OUTPUT_LIMIT
            out, err = (held.decode(errors="replace") for held in run.captures.values())
            return Ended(outcome, process.returncode, out, err, seconds, run.ready)

    def body() -> None:
        try:
            tell = partial(done.set_result, whole())
        except BaseException as error:
            tell = partial(done.set_exception, error)
        # A loop that was closed over a run has nobody left to tell.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(tell)

    # A daemon: an interpreter that exits takes the run with it and does not wait for its clock.
    threading.Thread(target=body, name="sandbox-run", daemon=True).start()
    try:
        return await asyncio.shield(done)
    except asyncio.CancelledError:
        if not done.done():
            os.eventfd_write(stop, 1)
        # Whoever is cancelled twice still may not close what the thread works with.
        while not done.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([done])
        raise


async def gone(process: asyncio.subprocess.Process) -> int:
    """Wait until a process has ended. asyncio's own wait is also for its pipes, which others may hold open."""
    if process.returncode is not None:
        return process.returncode  # its number may be another's by now
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    with suppress(ProcessLookupError):  # it has been reaped
        pidfd = os.pidfd_open(process.pid)
        loop.add_reader(pidfd, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)
    while process.returncode is None:  # asyncio is about to take notice
        await asyncio.sleep(0.001)
    return process.returncode


async def let_go(process: asyncio.subprocess.Process) -> None:
    """Close the pipes of a process that has ended; what it has started may hold their other ends open."""
    process._transport.close()  # type: ignore[attr-defined]
    await process.wait()


class _Run:
    """One run's clock, pipes and memory. Each watched descriptor has a handler that says whether it is done with."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        stdin: bytes,
        wall_s: float,
        output_bytes: int,
        watch: Watch | None,
        stop: int,
    ) -> None:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        self._wall_s, self._output_bytes, self._watch = wall_s, output_bytes, watch
        self._stdin, self._left = process.stdin, memoryview(stdin)
        self.captures = {process.stdout: bytearray(), process.stderr: bytearray()}
        self._outcome: Outcome | None = None
        self._status, self._first_pid = b"", 0
        self._memory: TreeMemory | None = None
        self._memory_bytes = 0
        self._pidfd = os.pidfd_open(process.pid)
        self._first = -1
        """Readable once the sandbox's first process is gone, which is after all others in it."""
        self._selector = selectors.DefaultSelector()
        self.overflow = False
        self.ready = watch is None
        self.begin = self._next_look = time.monotonic()
        self._deadline = self.begin + (wall_s if self.ready else SETUP_S)
        self._selector.register(self._stdin, selectors.EVENT_WRITE, self._feed)
        for stream, held in self.captures.items():
            self._selector.register(stream, selectors.EVENT_READ, partial(self._take, stream, held))
        for descriptor in (self._pidfd, stop):
            self._selector.register(descriptor, selectors.EVENT_READ, partial(self._over, Outcome.EXITED))
        if watch is not None:
            self._selector.register(watch.status, selectors.EVENT_READ, partial(self._told, watch))
        self._rest = watch.rest if watch is not None else None
        if self._rest is not None:
            self._selector.register(self._rest.over, selectors.EVENT_READ, self._look_again)

    def until_over(self) -> Outcome:
        """Serve until it has ended or must be."""
        while self._outcome is None:
            self._serve(min(self._deadline, self._next_look) if self._memory else self._deadline)
            now = time.monotonic()
            if now >= self._deadline:
                self._serve(now)  # what came while this thread waited for its turn
                if now >= self._deadline:  # perhaps it is only ready now
                    self._over(Outcome.TIMEOUT)
            if self._memory is not None and now >= self._next_look:
                self._look(self._memory, now)
        return self._outcome

    def drain(self) -> None:
        """Read what was written before the end, and wait until everything is dead, also what holds no pipe."""
        for key in list(self._selector.get_map().values()):
            if key.fileobj not in self.captures:
                self._selector.unregister(key.fileobj)
        if self._first >= 0:
            self._selector.register(self._first, selectors.EVENT_READ, lambda: CLOSED)
        until = time.monotonic() + DRAIN_S
        while self._selector.get_map() and time.monotonic() < until:
            self._serve(until)

    def close(self) -> None:
        """Let go of what was opened here."""
        self._selector.close()
        os.close(self._pidfd)
        if self._first >= 0:
            os.close(self._first)
        if self._memory is not None:
            self._memory.close()

    def _serve(self, until: float) -> None:
        for key, _ in self._selector.select(max(0.0, until - time.monotonic())):
            if key.data() is CLOSED:
                self._selector.unregister(key.fileobj)

    def _over(self, outcome: Outcome) -> None:
        self._outcome = self._outcome or outcome

    def _feed(self) -> object:
        # A program may end, or close its input, without reading all of it.
        try:
            self._left = self._left[os.write(self._stdin.fileno(), self._left[:CHUNK]) :]
        except BlockingIOError:
            return None  # it writes to its own input
        except BrokenPipeError:
            self._left = self._left[:0]
        if self._left:
            return None
        self._selector.unregister(self._stdin)
        self._stdin.close()
        return None

    def _take(self, stream: IO[bytes], held: bytearray) -> object:
        try:
            chunk = os.read(stream.fileno(), CHUNK)
        except BlockingIOError:
            return None  # it reads its own output
        room = self._output_bytes - len(held)
        held += chunk[: max(0, room)]
        if len(chunk) > room:
            self.overflow = True
            self._over(Outcome.OUTPUT_LIMIT)
        return None if chunk else CLOSED

    def _told(self, watch: Watch) -> object:
        """bubblewrap's JSON lines, of which the first process's number matters, and READY."""
        chunk = os.read(watch.status, CHUNK)
        *lines, self._status = (self._status + chunk).split(b"\n")
        for line in lines:
            if line == READY:
                self.ready = True
                self.begin = self._next_look = time.monotonic()
                self._deadline = self.begin + self._wall_s
                self._watch_memory(watch)
                continue
            pid = json.loads(line).get("child-pid", 0) if line else 0
            if pid and not self._first_pid:
                self._first_pid = pid
                with suppress(ProcessLookupError):  # it is over already
                    self._first = os.pidfd_open(pid)
        return None if chunk else CLOSED

    def _watch_memory(self, watch: Watch) -> None:
        if watch.memory_bytes is None:
            return
        self._memory_bytes = watch.memory_bytes
        try:
            self._memory = TreeMemory(self._first_pid, watch.folders)
        except (FileNotFoundError, ProcessLookupError, PermissionError) as error:
            # It may be over already. Otherwise what cannot be watched does not run; where that is always so, the
            # start-up probe says it.
            if isinstance(error, PermissionError) or not self._first_pid:
                self._over(Outcome.MEMORY_LIMIT)

    def _look_again(self) -> None:
        assert self._rest is not None
        os.eventfd_read(self._rest.over)
        self._next_look = time.monotonic()

    def _look(self, memory: TreeMemory, now: float) -> None:
        left = self._memory_bytes - memory.held(self._memory_bytes)
        if left < 0:
            self._over(Outcome.MEMORY_LIMIT)
        pause = left / (FILL_BYTES_PER_S * (os.cpu_count() or 1))
        pause = min(max(pause, SHORTEST_WATCH_S), LONGEST_WATCH_S)
        self._next_look = now + (RESTING_WATCH_S if self._rest is not None and self._rest.resting else pause)


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.returncode is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
