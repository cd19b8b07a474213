"""`steps run` as two processes: one works, the other waits for it and says how it ended where it could not say so.

Ray ends its driver without a word when one of Ray's own processes dies, the kernel kills what uses too much memory, a
library may crash: then nobody unwinds the run. The waiting process has imported nothing, so hardly anything can happen
to it. Signals it gets are handed on; if it is killed itself, the kernel kills the working one.

What the working process, its libraries and its children print goes through a pipe of our own, which always has a
reader: a thread of the process that waits hands everything on for as long as somebody listens, and the last words of
one that died too, so that `steps run … | head` runs to its end. Terminals and files are left alone.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import select
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nemotron_steps import stopping

if TYPE_CHECKING:
    from nemotron_steps.errors import StepsError

_PR_SET_PDEATHSIG = 1
_SI_KERNEL = 0x80
"""si_code of a signal from the terminal's driver, which sends it to every process of the foreground group."""
_UNHEARD_S, _UNHEARD_AGAIN_S = 20.0, 5.0
"""How long the working process may take to hear a request to stop, or to end after a second one."""
_UNWINDS_S = 300.0
"""How long it may take to end once it has heard: closing a cluster, finishing a checkpoint."""
_DRAIN_S = 5.0
"""How long the end may take to hand on what was printed last."""
_HANDED_ON = {*stopping.NUMBERS}

_channel: int | None = None
"""Where the working process says which run it works on, and that it has said how it ended."""


def announce(run: str, home: str) -> None:
    """Tell the waiting process, if there is one, which run this process works on."""
    _send({"run": run, "home": home})


def supervise(work: Callable[[], int], report: Callable[[StepsError], int]) -> int:
    """Do `work` in a process of its own; returns, in both, its exit code, or what `report` makes of its death."""
    if sys.platform != "linux":
        return work()
    global _channel
    sys.stdout.flush()
    sys.stderr.flush()
    reading_end, _channel = os.pipe()
    relay = Relay()
    parent = os.getpid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, as some callers leave it, it would never come
    # Blocked from before the fork on, so that none is lost or taken for this process's own.
    waited_for = {signal.SIGCHLD, *_HANDED_ON}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited_for)
    worker = os.fork()
    if worker == 0:
        os.close(reading_end)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before that was asked for
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        relay.write_into()
        stopping.heard = lambda: _send({"heard": True})
        code = work()
        _send({"code": code})
        return code
    relay.hand_on()
    reported: dict[str, Any] = {}
    status = _wait(worker, waited_for, reading_end, reported)
    relay.finish()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    reported.update(_received(reading_end))
    if "code" in reported:
        return int(reported["code"])
    return report(_death(reported, status))


def _send(fields: dict[str, Any]) -> None:
    if _channel is not None:
        os.write(_channel, json.dumps(fields).encode() + b"\n")


def _received(channel: int) -> dict[str, Any]:
    """What the working process told, the last word on each thing. It is dead; its own children may hold the pipe."""
    os.set_blocking(channel, False)
    data = b""
    try:
        while part := os.read(channel, 65536):
            data += part
    except BlockingIOError:
        pass
    reported: dict[str, Any] = {}
    for line in data.splitlines():
        reported.update(json.loads(line))
    return reported


def _wait(worker: int, signals: set[signal.Signals], channel: int, reported: dict[str, Any]) -> int:
    """Wait for the working process, handing on signals; returns its wait status. What it tells meanwhile is added to
    `reported`. One that waits in a library hears no signal and is ended."""
    first, last, ends, again = 0.0, 0, math.inf, False
    while True:
        left = ends - time.monotonic()
        info = signal.sigtimedwait(signals, max(left, 0.0)) if ends < math.inf else signal.sigwaitinfo(signals)
        if info is None:
            reported.update(_received(channel))
            if reported.pop("heard", False) and not again:
                ends = first + _UNWINDS_S
                continue
            os.kill(worker, signal.SIGKILL)
            os.waitpid(worker, 0)
            return last
        if info.si_signo in _HANDED_ON:
            first, last = first or time.monotonic(), info.si_signo
            again = time.monotonic() - first > stopping.SAME_S
            ends = min(ends, time.monotonic() + (_UNHEARD_AGAIN_S if again else _UNHEARD_S))
            if info.si_code != _SI_KERNEL:
                os.kill(worker, info.si_signo)
        ended, status = os.waitpid(worker, os.WNOHANG)
        if ended:
            return status


def _death(reported: dict[str, Any], status: int) -> StepsError:
    """Write down that the working process died without doing so; the error that says it."""
    from nemotron_steps.artifacts.store import ArtifactStore
    from nemotron_steps.errors import InterruptedRunError, StepsError, WorkerLostError
    from nemotron_steps.runs.recorder import record_death

    if sys.stdout.isatty():
        sys.stdout.write("\x1b[?25h\n")  # a progress display that could not tidy up hides the cursor
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    how = f"killed by {signal.Signals(number).name}" if number is not None else f"exit code {os.WEXITSTATUS(status)}"
    asked_by = signal.Signals(number).name if number in _HANDED_ON else None
    error: StepsError = WorkerLostError("the process that worked on this ended without a word", found=how)
    if asked_by is not None:
        error = InterruptedRunError(f"ended by {asked_by}", hints=("run the same command again to go on",))
    if "run" in reported:
        try:
            error = record_death(ArtifactStore(reported["home"]), reported["run"], how, asked_by=asked_by)
        except StepsError as unwritable:
            error.hints = (f"what happened could not be written down: {unwritable.what}",)
    return error


def open_standard_streams() -> None:
    """Open what of descriptors 0, 1 and 2 is closed (`>&-`) on /dev/null: a file opened later must not become one."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w")
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w")


class Relay:
    """Pipes in the place of standard output and error, made before a fork: one side writes, the other hands on."""

    def __init__(self) -> None:
        self._pipes: dict[int, _Pipe] = {}
        places: dict[tuple[int, int], _Pipe] = {}
        for descriptor in (1, 2):
            status = os.fstat(descriptor)
            if stat.S_ISFIFO(status.st_mode) or stat.S_ISSOCK(status.st_mode):
                # One pipe for `2>&1`, so that the order of lines stays.
                place = (status.st_dev, status.st_ino)
                if place not in places:
                    places[place] = _Pipe(descriptor)
                self._pipes[descriptor] = places[place]

    def write_into(self) -> None:
        """In the process that works: print into the pipes, of which it needs nothing else."""
        for descriptor, pipe in self._pipes.items():
            os.dup2(pipe.write, descriptor)
        for pipe in set(self._pipes.values()):
            for each in (pipe.onward, pipe.read, pipe.write, pipe.stopped, pipe.stop):
                os.close(each)

    def hand_on(self) -> None:
        """In the process that waits: hand on what comes, in threads of their own."""
        for pipe in set(self._pipes.values()):
            os.set_blocking(pipe.read, False)
            pipe.thread.start()

    def finish(self) -> None:
        """In the process that waits, when the other is over: hand on the rest.

        Where nobody listens any more, this process's own output goes nowhere from here on.
        """
        for pipe in set(self._pipes.values()):
            os.close(pipe.stop)
            pipe.thread.join(_DRAIN_S)
        for descriptor, pipe in self._pipes.items():
            if not pipe.is_heard:
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)


class _Pipe:
    """One pipe, and where its contents are handed on to for as long as that is heard."""

    def __init__(self, descriptor: int) -> None:
        self.onward = os.dup(descriptor)
        self.read, self.write = os.pipe()
        self.stopped, self.stop = os.pipe()
        self.is_heard = True
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        # This process keeps the writing end open, so that an empty pipe is never taken for its end: children of the
        # one that works may still print when it is over.
        while True:
            ready, _, _ = select.select([self.read, self.stopped], [], [])
            try:
                data = os.read(self.read, 65536)
            except BlockingIOError:
                if self.stopped in ready:
                    return
                continue
            while data and self.is_heard:
                try:
                    data = data[os.write(self.onward, data) :]
                except BlockingIOError:
                    select.select([], [self.onward], [])
                except OSError:
                    self.is_heard = False
