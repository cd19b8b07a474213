"""The time by which a run must have saved: `checkpointing.checkpoint_must_save_by`.

A job's time limit kills whatever it meets, so a checkpoint has to be *committed* by then. After each step the run goes
on only if another step and its save would be over in time, going by the longest of the last ones. Steps and saves not
measured yet count as 0 s: leave room for the first save.
"""

from __future__ import annotations

import time
from collections import deque

RECENT = 20
"""Steps and saves whose longest is expected of the next."""


class Deadline:
    """When to save and stop. Written to by a checkpoint's writing thread as well.

    Args:
        seconds: from `started` on; None for no deadline.
        started: when the run began, before anything was loaded; `time.monotonic()`.
    """

    def __init__(self, seconds: float | None, started: float) -> None:
        self._seconds = seconds
        self._started = started
        self._steps: deque[float] = deque(maxlen=RECENT)
        self._saves: deque[float] = deque(maxlen=RECENT)
        self._step_began = time.monotonic()

    @property
    def reached(self) -> bool:
        """Whether another step and its save might not be over in time."""
        if self._seconds is None:
            return False
        needed = max(self._steps, default=0.0) + max(self._saves, default=0.0)
        return time.monotonic() - self._started + needed >= self._seconds

    def step_begins(self) -> None:
        """What came before (loading, a save) is no part of the step's time."""
        self._step_began = time.monotonic()

    def step_ended(self) -> None:
        """A step is over, and with what comes after it the next begins."""
        self._steps.append(time.monotonic() - self._step_began)
        self.step_begins()

    def saved(self, seconds: float) -> None:
        """A save took so long, from being asked for to being committed."""
        self._saves.append(seconds)
