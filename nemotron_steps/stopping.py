"""Requests to stop, by SIGINT or SIGTERM: a fact that is looked at, beside the KeyboardInterrupt that says so once.

That may be swallowed, by what was being collected at that moment, or become the error of a module that was being
imported: it is raised again until it unwinds, and whoever catches broadly asks `was_asked`. Light, for the command line
installs `note` before it imports anything else.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager

TYPE_CHECKING = False
if TYPE_CHECKING:
    import logging
    from collections.abc import Callable, Iterator
    from types import FrameType

SAME_S = 0.5
"""Two signals within so long are one: whoever signals a process group reaches a process in several ways."""
AGAIN_S = 1.0
"""How long an interrupt that nothing unwinds for is taken for swallowed, and raised again."""
NUMBERS = (signal.SIGINT, signal.SIGTERM)

heard: Callable[[], None] | None = None
"""Called when a request has come to this process: it is not deaf."""
_asked: list[dict[str, str]] = []
"""Of `note` and every `interruptible` that is entered, the outermost first: "signal" → which it was, once one came."""
_first = 0.0


def was_asked() -> bool:
    """Whether a request to stop has come."""
    return any(_asked)


def stop_if_asked() -> None:
    """KeyboardInterrupt if a request to stop has come and nothing unwinds for it, which is not interrupted again."""
    if was_asked() and sys.exc_info()[0] is None and threading.current_thread() is threading.main_thread():
        raise KeyboardInterrupt


def note() -> None:
    """From here to the end of this process a request to stop is noted, unless `interruptible` does more.

    Before that is entered there is nothing to unwind, afterwards nothing to stop. A later request ends the process.
    """
    seen: dict[str, str] = {}
    _asked.append(seen)
    for number in NUMBERS:
        signal.signal(number, lambda number, _: None if _note(number, seen) else _end_by(number))


def ignore() -> None:
    """For the very end of a process, when Python gives the handlers back: what comes now comes too late."""
    for number in NUMBERS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def interruptible(ends_process: bool = True, *, tells: bool = True) -> Iterator[dict[str, str]]:
    """Raise KeyboardInterrupt on the first SIGINT or SIGTERM, or one that came before; a later one ends the process at
    once.

    Args:
        tells: say on a terminal what a second Ctrl-C does.
        ends_process: False where the process is not the run's, as a notebook's kernel: a later SIGINT is another
            KeyboardInterrupt, and what unwinds is cut short.

    Yields a dict whose "signal" says which it was. Outside the main thread signals cannot be handled and nothing is
    changed.
    """
    seen: dict[str, str] = {}
    if threading.current_thread() is not threading.main_thread():
        yield seen
        return

    def stop(number: int, _: FrameType | None) -> None:
        global _first
        if again:
            again.clear()
            if over or _interrupts(sys.exc_info()[1]):
                return
        elif seen:
            if _note(number, seen):
                return
            if number != signal.SIGINT or ends_process:
                return _end_by(number)
            _first = time.monotonic()
        else:
            _note(number, seen)
            _hush()
            if tells and number == signal.SIGINT and os.isatty(2):
                # Unwinding may take a while. Not through `sys.stderr`, which may be in the middle of a write.
                does = b"ends it at once" if ends_process else b"does not wait for it"
                os.write(2, b"\nstopping; a second Ctrl-C " + does + b"\n")
            if over:
                return
            _thread.start_new_thread(raise_again, ())  # `threading`'s own takes locks that may be held here
        raise KeyboardInterrupt

    def raise_again() -> None:
        while True:
            time.sleep(AGAIN_S)
            with sending:
                if over:
                    return
                for number in NUMBERS:  # a library may have taken one
                    if signal.getsignal(number) is stop:
                        again.append(number)
                        signal.pthread_kill(main, number)
                        break

    main, over, again, sending = threading.get_ident(), False, list[int](), threading.Lock()
    previous = {number: signal.signal(number, stop) for number in NUMBERS}
    _asked.append(seen)
    try:
        stop_if_asked()
        yield seen
    finally:
        before, over = bool(seen), True
        with sending:  # what is sent from now on finds another handler
            _asked.pop()
        for number, handler in previous.items():
            signal.signal(number, handler)
        if _asked:
            _asked[-1].update(seen)
        elif seen and not before:
            raise KeyboardInterrupt


@contextmanager
def left_to_us() -> Iterator[None]:
    """Take requests to stop back from a library that installs handlers of its own within: Ray's would exit."""
    before = {number: signal.getsignal(number) for number in NUMBERS}
    try:
        yield
    except SystemExit as error:  # what such a handler raises
        if error.code in NUMBERS:
            raise KeyboardInterrupt from error
        raise
    finally:
        if _asked and threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)


def was_interrupted(error: BaseException | None) -> bool:
    """Whether a request to stop is behind an error: an event loop that cannot be closed under it raises one of its own,
    and so does a module that is being imported."""
    return was_asked() or _interrupts(error)


def _interrupts(error: BaseException | None) -> bool:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, KeyboardInterrupt):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def _note(number: int, seen: dict[str, str]) -> bool:
    """Note a request; False for one that is not the same as the first."""
    global _first
    if not was_asked():
        _first = time.monotonic()
    seen.setdefault("signal", signal.Signals(number).name)
    if heard is not None:
        heard()
    return time.monotonic() - _first <= SAME_S


def _end_by(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _hush() -> None:
    """Let the tasks that an interrupt tears down go without a traceback each: the interrupt is reported once.

    asyncio tells of them when they are collected, which is after the run has ended, so nothing is put back.
    """
    if sys.unraisablehook is sys.__unraisablehook__:
        sys.unraisablehook = _unraisable
    if "asyncio" in sys.modules:
        import logging
        import warnings

        asyncio_log = logging.getLogger("asyncio")
        if _tells_more_than_an_interrupt not in asyncio_log.filters:
            asyncio_log.addFilter(_tells_more_than_an_interrupt)
        warnings.filterwarnings("ignore", message="coroutine .* was never awaited", category=RuntimeWarning)


def _unraisable(about: sys.UnraisableHookArgs) -> None:
    """Python tells of what it swallows; an interrupt is raised again."""
    if not issubclass(about.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(about)


def _tells_more_than_an_interrupt(record: logging.LogRecord) -> bool:
    interrupted = record.exc_info and isinstance(record.exc_info[1], KeyboardInterrupt)
    return not interrupted and not record.getMessage().startswith("Task was destroyed but it is pending")
