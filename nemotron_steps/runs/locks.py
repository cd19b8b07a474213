"""Locks between processes: advisory locks on files, released by the kernel when their holder dies, however it dies.

A forked child would keep its parent's lock alive after the parent's death, so children let go of it when they start.
"""

import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from nemotron_steps.waiting import waiting

_TRIES = 4
_PAUSE_S = 0.02
_held: set[IO[str]] = set()


@contextmanager
def hold(path: Path, holder: dict[str, Any], on_wait: Callable[[dict[str, Any]], None]) -> Iterator[bool]:
    """Hold the lock at `path`; yields whether another process had to be waited for."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        waited = not _try_lock(file)
        if waited:
            on_wait(there := read_holder(path))
            with waiting(f"process {there.get('pid', '?')} on {there.get('host', '?')} to let go of {path}"):
                fcntl.flock(file, fcntl.LOCK_EX)
        _held.add(file)
        try:
            file.seek(0)
            file.truncate()
            json.dump({"pid": os.getpid(), "host": socket.gethostname(), **holder}, file)
            file.flush()
            yield waited
        finally:
            _held.discard(file)


@contextmanager
def hold_if_free(path: Path) -> Iterator[bool]:
    """Hold the lock at `path` unless someone does; yields whether it is held."""
    with path.open("a+") as file:
        free = _try_lock(file)
        if free:
            _held.add(file)
        try:
            yield free
        finally:
            _held.discard(file)


def _try_lock(file: IO[str]) -> bool:
    # Several tries: someone asking `is_held` holds the lock for a moment, and is not worth waiting for aloud.
    for attempt in range(_TRIES):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if attempt + 1 < _TRIES:
                time.sleep(_PAUSE_S)
    return False


def _let_go_in_child() -> None:
    for file in _held:
        os.close(file.fileno())
    _held.clear()


os.register_at_fork(after_in_child=_let_go_in_child)


def is_held(path: Path) -> bool:
    """Whether a live process holds the lock at `path`."""
    try:
        with path.open("r") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def read_holder(path: Path) -> dict[str, Any]:
    """The note of the present (or last) holder; empty if there is none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}
