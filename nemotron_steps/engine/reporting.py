"""What the engine reports to, and how it times its phases. The runs layer's Tracker is a Reporter."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import fmean
from typing import Any, Protocol

_WINDOW = 5
"""Training steps that a summary averages over, at its start and at its end."""


class Reporter(Protocol):
    """Receives what happens during training."""

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """Numbers of one training step."""

    def sample(self, sample: Mapping[str, Any]) -> None:
        """One example worth reading."""

    def groups(self, step: int, groups: Sequence[Mapping[str, Any]]) -> None:
        """What became of prompts by the end of one training step, one entry a prompt: `prompt` (row of the file),
        `attempt` (0 for the first) and `outcome` (`trained`, `dropped`, or why it was discarded), asynchronously also
        `position` (place in the data order). Of a step that is reported again the later report counts."""

    def event(self, name: str, **fields: Any) -> None:
        """Something that happened."""

    def signal(self, name: str, **numbers: Any) -> None:
        """A warning sign over metrics."""

    def progress(self, description: str, completed: float, total: float | None = None) -> None:
        """How far the work is."""


def first_and_last(name: str, values: Sequence[float]) -> dict[str, float]:
    """Means of a metric's first and last five training steps, for a summary."""
    known = [value for value in values if value == value]
    width = min(_WINDOW, len(known) // 2)
    if width == 0:
        return {name: known[0]} if known else {}
    steps = "step" if width == 1 else f"{width}_steps"
    return {f"{name}_first_{steps}": fmean(known[:width]), f"{name}_last_{steps}": fmean(known[-width:])}


class PhaseTimer:
    """Seconds spent in each named phase of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time inside the block to `name`."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    def metrics(self) -> dict[str, float]:
        """As `timing/<phase>_s` metrics."""
        return {f"timing/{name}_s": value for name, value in self.seconds.items()}
