"""SIGTERM as a KeyboardInterrupt, so that both ways of stopping a run unwind it the same way, once."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from nemotron_steps.errors.stopping import SAME_S, asked, stop_if_asked, was_asked


@contextmanager
def interruptible(ends_process: bool = True, *, tells: bool = True) -> Iterator[dict[str, str]]:
    """Raise KeyboardInterrupt on the first SIGINT or SIGTERM, or one that came before; a later one ends the process at
    once.

    Args:
        tells: say on a terminal what a second Ctrl-C does.
        ends_process: False where the process is not the run's, as a notebook's kernel: a later SIGINT is another
            KeyboardInterrupt, and what unwinds is cut short.

    One that follows at once is the same one: whoever signals a process group reaches a process in several ways.

    Yields a dict whose "signal" says which it was. Outside the main thread signals cannot be handled and nothing is
    changed.
    """
    seen: dict[str, str] = {}
    if threading.current_thread() is not threading.main_thread():
        yield seen
        return

    first = 0.0

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal first
        if "signal" in seen:
            if time.monotonic() - first > SAME_S:
                if number == signal.SIGINT and not ends_process:
                    first = time.monotonic()
                    raise KeyboardInterrupt
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        first = time.monotonic()
        seen["signal"] = signal.Signals(number).name
        _hush_asyncio()
        if tells and number == signal.SIGINT and os.isatty(2):
            # Unwinding may take a while. Not through `sys.stderr`, which may be in the middle of a write.
            does = b"ends it at once" if ends_process else b"does not wait for it"
            os.write(2, b"\nstopping; a second Ctrl-C " + does + b"\n")
        raise KeyboardInterrupt

    previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    asked.append(seen)
    try:
        stop_if_asked()
        yield seen
    finally:
        asked.pop()
        for number, handler in previous.items():
            signal.signal(number, handler)


def was_interrupted(error: BaseException) -> bool:
    """Whether an interrupt is behind an error: an event loop that cannot be closed under it raises one of its own, and
    so does a module that is being imported."""
    if was_asked():
        return True
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        if isinstance(each, KeyboardInterrupt):
            return True
        seen.add(id(each))
        each = each.__cause__ or each.__context__
    return False


def _hush_asyncio() -> None:
    """Let the tasks that an interrupt tears down go without a traceback each: the interrupt is reported once.

    asyncio tells of them when they are collected, which is after the run has ended, so nothing is put back.
    """
    asyncio_log = logging.getLogger("asyncio")
    if _tells_more_than_an_interrupt not in asyncio_log.filters:
        asyncio_log.addFilter(_tells_more_than_an_interrupt)
    warnings.filterwarnings("ignore", message="coroutine .* was never awaited", category=RuntimeWarning)


def _tells_more_than_an_interrupt(record: logging.LogRecord) -> bool:
    interrupted = record.exc_info and isinstance(record.exc_info[1], KeyboardInterrupt)
    return not interrupted and not record.getMessage().startswith("Task was destroyed but it is pending")
