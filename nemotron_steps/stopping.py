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
    from typing import Any

SAME_S = 0.5
"""Two signals within so long are one: whoever signals a process group reaches a process in several ways."""
AGAIN_S = 1.0
"""How long an interrupt that nothing unwinds for is taken for swallowed, and raised again."""
NUMBERS = (signal.SIGINT, signal.SIGTERM)

heard: Callable[[], None] | None = None  # called when a request has come to this process: it is not deaf
_asked: list[dict[str, str]] = []
"""Of `note` and every `interruptible` that is entered, the outermost first: "signal" → which it was, once one came."""
_first = 0.0
_deferring: list[int] = []
"""Threads that are within `deferred`."""
_late = False
"""Whether a request was noted where nothing was to be interrupted, and has not been raised since."""
_install = signal.signal  # whatever `left_to_us` puts in its place


def was_asked() -> bool:
    """Whether a request to stop has come."""
    return any(_asked)


def stop_if_asked() -> None:
    """KeyboardInterrupt if a request to stop has come and nothing unwinds for it, which is not interrupted again."""
    global _late
    here = threading.current_thread()
    if was_asked() and sys.exc_info()[0] is None and here is threading.main_thread() and here.ident not in _deferring:
        _late = False
        raise KeyboardInterrupt


def note() -> None:
    """From here on a request to stop is noted, unless `interruptible` does more: before that is entered there is
    nothing to unwind, afterwards nothing to stop. A later request ends the process."""
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
    once, or, where the process is not the run's (a notebook's kernel: not `ends_process`), is another interrupt.

    Yields a dict whose "signal" says which it was. Outside the main thread nothing is changed. `tells`: say on a
    terminal what a second Ctrl-C does."""
    global _late
    seen: dict[str, str] = {}
    if threading.current_thread() is not threading.main_thread():
        yield seen
        return

    def stop(number: int, _: FrameType | None) -> None:
        global _first, _late
        if number in again:
            again.clear()
            if over or main in _deferring or _interrupts(sys.exc_info()[1]):
                return
        elif seen:
            if over or _note(number, seen):
                return
            if number != signal.SIGINT or ends_process:
                return _end_by(number)
            _first = time.monotonic()
        else:
            _note(number, seen)
            if ends_process:
                _hush()
            if tells and number == signal.SIGINT and os.isatty(2):
                # Unwinding may take a while. Not through `sys.stderr`, which may be in the middle of a write.
                does = b"ends it at once" if ends_process else b"does not wait for it"
                os.write(2, b"\nstopping; a second Ctrl-C " + does + b"\n")
            if over or main in _deferring:
                _late = True
                return
            _thread.start_new_thread(raise_again, ())  # `threading`'s own takes locks that may be held here
        _late = False
        raise KeyboardInterrupt

    def raise_again() -> None:
        # Not by the same signal if that can be: a second one of the user's would be taken for this one.
        numbers = sorted(NUMBERS, key=lambda number: number.name == seen["signal"])
        while True:
            time.sleep(AGAIN_S)
            with sending:
                if over:
                    return
                for number in numbers:  # a library may have taken one
                    if signal.getsignal(number) is stop:
                        again.append(number)
                        signal.pthread_kill(main, number)
                        break

    main, over, again, sending = threading.get_ident(), False, list[int](), threading.Lock()
    previous, depth = {number: signal.getsignal(number) for number in NUMBERS}, len(_asked)
    try:
        _asked.append(seen)
        for number in NUMBERS:
            _install(number, stop)
        stop_if_asked()
        yield seen
    finally:
        over = True  # before any call, after which an interrupt might be raised
        with sending:  # what is sent from now on finds another handler
            del _asked[depth:]
        for number, handler in previous.items():
            _install(number, handler)
        late, _late = _late, False
        if late and not _asked:
            raise KeyboardInterrupt
        if _asked and not (late and sys.exc_info()[0]):  # else the error ends the command, and is what is reported
            _asked[-1].update(seen)


@contextmanager
def deferred() -> Iterator[None]:
    """A first request to stop within is noted alone, for `stop_if_asked`: around what is short and not to be halved."""
    _deferring.append(threading.get_ident())
    try:
        yield
    finally:
        _deferring.remove(threading.get_ident())


@contextmanager
def left_to_us() -> Iterator[None]:
    """Let no library within take requests to stop by a handler of its own: Ray's would exit."""
    if not _asked or threading.current_thread() is not threading.main_thread():
        yield
        return
    process, install = os.getpid(), signal.signal

    def unless_ours(signalnum: int, handler: Any) -> Any:
        ours = signalnum in NUMBERS and os.getpid() == process  # a forked child may do as it likes
        return signal.getsignal(signalnum) if ours else install(signalnum, handler)

    signal.signal = unless_ours
    try:
        yield
    finally:
        signal.signal = install
        for number in NUMBERS:  # in C, of which Python does not know
            install(number, signal.getsignal(number))


def was_interrupted(error: BaseException | None) -> bool:
    """Whether a request to stop is behind an error: an event loop that cannot be closed under it raises one of its own,
    and so does a module that is being imported."""
    return was_asked() or _interrupts(error)


def _interrupts(error: BaseException | None) -> bool:
    chain = [] if error is None else [error]
    for each in chain:  # which grows meanwhile
        links = (each.__cause__, each.__context__)
        chain += [link for link in links if link is not None and not any(link is known for known in chain)]
    return any(isinstance(each, KeyboardInterrupt) for each in chain)


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
    _install(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _hush() -> None:
    """Let the tasks that an interrupt tears down go without a traceback each. asyncio tells of them when they are
    collected, which is after the run has ended, so nothing is put back."""
    if sys.unraisablehook is sys.__unraisablehook__:
        sys.unraisablehook = _unraisable
    if "asyncio" in sys.modules:
        import logging
        import warnings

        logging.getLogger("asyncio").addFilter(_tells_more_than_an_interrupt)  # which is once there
        warnings.filterwarnings("ignore", message="coroutine .* was never awaited", category=RuntimeWarning)


def _unraisable(about: sys.UnraisableHookArgs) -> None:
    """Python tells of what it swallows; an interrupt is raised again."""
    if not issubclass(about.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(about)


def _tells_more_than_an_interrupt(record: logging.LogRecord) -> bool:
    interrupted = record.exc_info and isinstance(record.exc_info[1], KeyboardInterrupt)
    return not interrupted and not record.getMessage().startswith("Task was destroyed but it is pending")
