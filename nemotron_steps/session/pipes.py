"""Standard output and error that nobody reading any more cannot break: `steps run … | head` runs to its end.

What the working process, its libraries and its children print goes through a pipe of our own, which always has a
reader: a thread of the process that waits for it hands everything on for as long as somebody listens, and the last
words of one that died too. Terminals and files are left alone.
"""

from __future__ import annotations

import os
import select
import stat
import sys
import threading

_DRAIN_S = 5.0
"""How long the end may take to hand on what was printed last."""


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
        """In the process that works: print into the pipes."""
        for descriptor, pipe in self._pipes.items():
            os.dup2(pipe.write, descriptor)
        for pipe in set(self._pipes.values()):
            pipe.close_all()

    def hand_on(self) -> None:
        """In the process that waits: hand on what comes, in threads of their own."""
        for pipe in set(self._pipes.values()):
            pipe.start()

    def finish(self) -> None:
        """In the process that waits, when the other is over: hand on the rest.

        Where nobody listens any more, this process's own output goes nowhere from here on.
        """
        for descriptor, pipe in self._pipes.items():
            if not pipe.finish():
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)


class _Pipe:
    """One pipe, and where its contents are handed on to."""

    def __init__(self, descriptor: int) -> None:
        self._onward = os.dup(descriptor)
        self._read, self.write = os.pipe()
        self._stopped, self._stop = os.pipe()
        self._listening = True
        self._thread = threading.Thread(target=self._run, daemon=True)

    def close_all(self) -> None:
        """In the process that writes, which needs none of these any more."""
        for descriptor in (self._onward, self._read, self.write, self._stopped, self._stop):
            os.close(descriptor)

    def start(self) -> None:
        os.set_blocking(self._read, False)
        self._thread.start()

    def finish(self) -> bool:
        """Hand on what is left; whether somebody still listens."""
        if self._stop >= 0:
            os.close(self._stop)
            self._stop = -1
            self._thread.join(_DRAIN_S)
        return self._listening

    def _run(self) -> None:
        # This process keeps the writing end open, so that an empty pipe is never taken for its end: children of the
        # one that works may still print when it is over.
        while True:
            ready, _, _ = select.select([self._read, self._stopped], [], [])
            try:
                data = os.read(self._read, 65536)
            except BlockingIOError:
                if self._stopped in ready:
                    return
                continue
            self._hand_on(data)

    def _hand_on(self, data: bytes) -> None:
        while data and self._listening:
            try:
                data = data[os.write(self._onward, data) :]
            except BlockingIOError:
                select.select([], [self._onward], [])
            except OSError:
                self._listening = False
