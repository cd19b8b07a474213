"""Whether this process was asked to stop: a fact, beside the KeyboardInterrupt that says so. That may be swallowed, by
what was being collected at that moment, or become the error of a module that was being imported."""

from __future__ import annotations

import sys
import threading

SAME_S = 0.5
"""Two signals within so long are one: whoever signals a process group reaches a process in several ways."""
asked: list[dict[str, str]] = []
"""Of every `runs.interrupts.interruptible` that is entered, the outermost first: "signal" → which it was, once one
came."""


def was_asked() -> bool:
    """Whether a signal to stop has come."""
    return any("signal" in each for each in asked)


def stop_if_asked() -> None:
    """KeyboardInterrupt if a signal to stop has come and nothing unwinds for it, which is not interrupted again."""
    if was_asked() and sys.exc_info()[0] is None and threading.current_thread() is threading.main_thread():
        raise KeyboardInterrupt
