"""Waits that are logged: who waits long for something says for what, and how long it waits at most."""

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

FIRST_S, LONGEST_S = 30.0, 600.0
"""A wait is logged after so long, then each time that it has doubled, and at least so often."""
_LOOK_S = 0.1
_LOG = logging.getLogger(__name__)

_under_way: dict[object, tuple[str, float | None, float]] = {}
_lock = threading.Lock()
_teller: threading.Thread | None = None


@contextmanager
def waiting(what: str, at_most_s: float | None = None) -> Iterator[None]:
    """Say that `what` is waited for if that takes long; around an `await` as well. Equal waits are logged as one."""
    global _teller
    wait = object()
    try:
        _under_way[wait] = (what, at_most_s, time.monotonic())
        with _lock:
            if _teller is None or not _teller.is_alive():  # nor is it in a forked child
                _teller = threading.Thread(target=_tell, name="waits", daemon=True)
                _teller.start()
        yield
    finally:
        _under_way.pop(wait, None)  # without the lock, on which an interrupt would leave it there


def _tell() -> None:
    global _teller
    due: dict[str, float] = {}
    while True:
        time.sleep(_LOOK_S)
        with _lock:
            if not _under_way:
                _teller = None
                return
            waits = list(_under_way.values())
        now = time.monotonic()
        found: dict[str, list[tuple[float, float | None]]] = {}
        for what, at_most_s, since in waits:
            found.setdefault(what, []).append((now - since, at_most_s))
        due = {what: at for what, at in due.items() if what in found}
        for what, several in found.items():
            longest, at_most_s = max(several, key=lambda each: each[0])
            if longest >= due.setdefault(what, FIRST_S):
                due[what] = longest + min(longest, LONGEST_S)
                many = f" ({len(several)} times)" if len(several) > 1 else ""
                most = "" if at_most_s is None else f" of at most {at_most_s:.0f} s"
                _LOG.warning("waiting for %s%s: %.0f s%s", what, many, longest, most)


def _forget() -> None:
    global _lock
    _lock = threading.Lock()
    _under_way.clear()


os.register_at_fork(after_in_child=_forget)
