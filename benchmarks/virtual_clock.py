"""An event loop whose clock jumps to the next timer instead of waiting for it: hours of a run in seconds.

What runs in its executor takes as long as it says with `spend`, and the loop goes on meanwhile, as beside a thread.
"""

import asyncio
import selectors
from collections.abc import Callable
from typing import Any


class _Jump(selectors.SelectSelector):
    """A selector that lets time pass at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        events = super().select(0)
        if events:
            return events
        if timeout is None:
            raise RuntimeError("nothing is scheduled on the virtual clock, and nothing is ready: the run hangs")
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """See the module docstring."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)
        self._spent = 0.0

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._jump.now

    def spend(self, seconds: float) -> None:
        """Called by what runs in the executor: it takes so long."""
        self._spent += seconds

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Run it now; its result arrives when what it spent has passed."""
        self._spent = 0.0
        done = self.create_future()
        try:
            result = func(*args)
        except Exception as error:
            self.call_later(self._spent, done.set_exception, error)
        else:
            self.call_later(self._spent, done.set_result, result)
        return done
