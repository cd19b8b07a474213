"""SIGTERM as a KeyboardInterrupt, so that both ways of stopping a run unwind it the same way, once."""

from __future__ import annotations

import logging
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interruptible() -> Iterator[dict[str, str]]:
    """Raise KeyboardInterrupt on the first SIGINT or SIGTERM; a second one ends the process at once.

    Yields a dict whose "signal" says which it was. Outside the main thread signals cannot be handled and nothing is
    changed.
    """
    seen: dict[str, str] = {}
    if threading.current_thread() is not threading.main_thread():
        yield seen
        return

    def stop(number: int, frame: FrameType | None) -> None:
        seen["signal"] = signal.Signals(number).name
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _hush_asyncio()
        raise KeyboardInterrupt

    previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield seen
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def was_interrupted(error: BaseException) -> bool:
    """Whether an interrupt is behind an error: an event loop that cannot be closed under it raises one of its own."""
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
