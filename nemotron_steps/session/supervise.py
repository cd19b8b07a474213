"""`steps run` as two processes: one works, the other waits for it and says how it ended where it could not say so.

Ray ends its driver without a word when one of Ray's own processes dies, the kernel kills what uses too much memory, a
library may crash: then nobody unwinds the run. The waiting process has imported nothing, so hardly anything can happen
to it. Signals it gets are handed on; if it is killed itself, the kernel kills the working one. What is printed into a
pipe goes through it, too, so that `steps run … | head` runs to its end.
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
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from nemotron_steps import stopping

if TYPE_CHECKING:
    from nemotron_steps.errors import StepsError

_PR_SET_PDEATHSIG = 1
_SI_KERNEL = 0x80
"""si_code of a signal from the terminal's driver, which sends it to every process of the foreground group."""
_UNHEARD_S, _UNWINDS_S, _AGAIN_S = 20.0, 300.0, 5.0
"""How long the working process may take to hear a request to stop, to end once it has heard (closing a cluster,
finishing a checkpoint), and to end after a second one."""
_DRAIN_S = 1.0
"""How long children of a process that is over are listened to."""

_channel: int | None = None
"""Where the working process says which run it works on, and that it has said how it ended."""


def announce(run: str, home: str) -> None:
    """Tell the waiting process, if there is one, which run this process works on."""
    _send({"run": run, "home": home})


def _send(fields: dict[str, Any]) -> None:
    if _channel is not None:
        os.write(_channel, json.dumps(fields).encode() + b"\n")


def supervise(work: Callable[[], int], report: Callable[[StepsError], int]) -> int:
    """Do `work` in a process of its own; returns, in both, its exit code, or what `report` makes of its death."""
    if sys.platform != "linux":
        return work()
    global _channel
    sys.stdout.flush()
    sys.stderr.flush()
    told, _channel = os.pipe()
    os.set_blocking(told, False)  # children of the worker may hold the other end
    relays = _relays()
    parent = os.getpid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, as some callers leave it, it would never come
    # Blocked from before the fork on, so that none is lost or taken for this process's own.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, *stopping.NUMBERS})
    worker = os.fork()
    if worker == 0:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before that was asked for
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for descriptor, relay in relays.items():
            os.dup2(relay.write, descriptor)
        for end in {told}.union(*((each.onward, each.read, each.write) for each in relays.values())):
            os.close(end)
        stopping.heard = lambda: _send({"heard": True})
        code = work()
        _send({"code": code})
        return code
    for relay in set(relays.values()):
        os.close(relay.write)
        relay.start()
    reported: dict[str, Any] = {}
    status = _wait(worker, told, reported)
    for relay in set(relays.values()):
        relay.join(_DRAIN_S)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    _receive(told, reported)
    if "code" in reported:
        return int(reported["code"])
    return report(_death(reported, status))


def _receive(told: int, reported: dict[str, Any]) -> None:
    """Add what the working process has told."""
    with suppress(BlockingIOError):
        for line in os.read(told, 65536).splitlines():
            reported.update(json.loads(line))


def _wait(worker: int, told: int, reported: dict[str, Any]) -> int:
    """Wait for the working process, handing on signals; its wait status. One that hears none, or goes on, is ended."""
    first, last, ends, again = 0.0, 0, math.inf, False
    while True:
        left = min(ends - time.monotonic(), 3600.0)
        info = signal.sigtimedwait({signal.SIGCHLD, *stopping.NUMBERS}, max(left, 0.0))
        now = time.monotonic()
        if info is None and now >= ends:
            _receive(told, reported)
            if reported.pop("heard", False) and not again:
                ends = first + _UNWINDS_S
                continue
            os.kill(worker, signal.SIGKILL)
            os.waitpid(worker, 0)
            return last
        if info is not None and info.si_signo in stopping.NUMBERS:
            again = bool(last) and now - first > stopping.SAME_S
            first, last = first or now, info.si_signo
            ends = min(ends, now + (_AGAIN_S if again else _UNHEARD_S))
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
    asked_by = signal.Signals(number).name if number in stopping.NUMBERS else None
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
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")


class _Relay(threading.Thread):
    """A pipe in the place of a standard stream, read to its end; what comes is handed on while somebody listens."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(daemon=True)
        self.onward = os.dup(descriptor)
        self.read, self.write = os.pipe()

    def run(self) -> None:
        """Hand on, in the process that waits."""
        while data := os.read(self.read, 65536):
            while data:
                try:
                    data = data[os.write(self.onward, data) :]
                except BlockingIOError:
                    select.select([], [self.onward], [])
                except OSError:  # nobody listens any more
                    break


def _relays() -> dict[int, _Relay]:
    """Of those of standard output and error that are pipes; one for `2>&1`, so that the order of lines stays."""
    places: dict[tuple[int, int], _Relay] = {}
    found = {}
    for descriptor in (1, 2):
        status = os.fstat(descriptor)
        if stat.S_ISFIFO(status.st_mode) or stat.S_ISSOCK(status.st_mode):
            place = (status.st_dev, status.st_ino)
            places[place] = found[descriptor] = places.get(place) or _Relay(descriptor)
    return found
