"""What is shown while a run works: the picture of `steps watch` on a terminal, timestamped lines anywhere else.

A display is a listener of run records; it decides nothing and keeps nothing. Call `close` when the run is over,
however it ended.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from nemotron_steps.cli.terminal import Terminal, number, printable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nemotron_steps.resolver.plan import Plan
    from nemotron_steps.runs.context import Record

_HEADLINES = (
    ("reward", "reward/mean"),
    ("validation", "validation/reward"),
    ("held-out reward", "heldout/reward"),
    ("accuracy", "accuracy"),
    ("loss", "loss"),
    ("validation loss", "validation_loss"),
    ("kl", "kl_penalty"),
)
"""The few numbers worth a place beside a bar: label → metric name."""

_SECONDS_BETWEEN_LINES = 5.0


class Display(Protocol):
    """A listener that draws."""

    def __call__(self, record: Record) -> None:
        """Show a record."""

    def close(self) -> None:
        """Stop drawing and leave the screen tidy."""


class Tolerant:
    """A display that goes dark when it cannot be drawn (a terminal that is gone, a full disk); the run goes on."""

    def __init__(self, display: Display) -> None:
        self._display: Display | None = display

    def __call__(self, record: Record) -> None:
        """Show a record, if anything is shown any more."""
        if self._display is not None:
            try:
                self._display(record)
            except OSError:
                self._display = None

    def close(self) -> None:
        """Leave the screen tidy, if it is there."""
        if self._display is not None:
            with suppress(OSError):
                self._display.close()


def open_display(terminal: Terminal, plan: Plan) -> Display:
    """The display for a terminal: a picture when it can redraw, lines otherwise."""
    if terminal.stream.isatty() and terminal.unicode:
        from nemotron_steps.cli.watch import PictureDisplay

        return PictureDisplay(terminal, plan)
    return LineDisplay(terminal)


def headline(values: Mapping[str, Any]) -> str:
    """The few numbers worth showing of a step's metrics: `reward 0.61  loss 0.02  kl 0.0031`."""
    numbers = {label: values.get(name) for label, name in _HEADLINES}
    shown = {label: value for label, value in numbers.items() if isinstance(value, int | float)}
    if shown.get("kl") == 0:
        del shown["kl"]
    return "  ".join(f"{label} {number(value)}" for label, value in shown.items())


class LineDisplay:
    """Timestamped lines. Metrics and progress of a step are shown at most every few seconds, and at its end."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._last = 0.0
        self._held: Record | None = None

    def __call__(self, record: Record) -> None:
        """Print a record, or hold it back."""
        if record["kind"] in ("metrics", "progress"):
            if record["kind"] == "progress" and self._held is not None and self._held["kind"] == "metrics":
                return
            now = time.monotonic()
            if now - self._last < _SECONDS_BETWEEN_LINES:
                self._held = record
                return
            self._last, self._held = now, None
        elif record["kind"] in ("sample", "run_finished", "summary"):
            return  # what the run achieved is said once, at its end
        text = _line(record)
        held = self._held
        # What is held back is older than this line, so it goes first.
        if text and held and (held["kind"] == "metrics" or record["kind"] in ("step_finished", "step_failed")):
            self._held = None
            self._write(held, _line(held) or "")
        if text is not None:
            self._write(record, text)

    def close(self) -> None:
        """Nothing is left on the screen to tidy."""
        self._terminal.stream.flush()

    def _write(self, record: Record, text: str) -> None:
        stamp = time.strftime("%H:%M:%S", time.localtime(record["time"]))
        self._terminal.print(f"{stamp} {printable(text)}")
        self._terminal.stream.flush()


def _line(record: Record) -> str | None:
    """A record as one line; None for what is not worth one."""
    from nemotron_steps.runs.log_format import render

    if record["kind"] == "progress":
        total = record["total"]
        count = f" {number(record['completed'])}/{number(total)}" if total else ""
        return f"[{record['step']}] {record['description']}{count}"
    if record["kind"] == "warning":
        return f"▲ {record['text']}"
    if record["kind"] == "metrics":
        numbers = headline(record["values"])
        if numbers:
            return f"[{record['step']}] step {record['index']}: {numbers}"
    return render(record)
