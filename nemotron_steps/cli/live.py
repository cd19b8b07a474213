"""What is shown while a run works: a bar per step on a terminal, timestamped lines anywhere else.

A display is a listener of run records; it decides nothing and keeps nothing. Call `close` when the run is over,
however it ended.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from nemotron_steps.cli.terminal import Terminal, clock, duration, number, printable, shorten, tail, visible_width

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nemotron_steps.resolver.plan import Plan
    from nemotron_steps.runs.tracker import Record

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
_BAR, _SHORTEST_BAR = 24, 8
"""Columns of a bar; a shorter one says less than what could stand in its place."""
_WIDE = 100
"""Columns from which on there is room for padding."""


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
    """The display for a terminal: bars when it can redraw, lines otherwise."""
    if terminal.stream.isatty() and terminal.unicode:
        return BarDisplay(terminal, plan)
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


def bar_line(
    width: int, name: str, share: float | None, count: str, numbers: str, elapsed: str
) -> list[tuple[str, str]]:
    """One step at work, fitted to `width` columns: (text, style) pieces.

    Step, count and time are always there; where columns are few the bar goes first, then the end of the numbers, then
    the beginning of the name.

    Args:
        share: how much is done, from 0 to 1; None where that is not known.
    """
    ends = "".join(f"  {text}" for text in (count, elapsed) if text)
    name = tail(name, max(width - len(ends), 8))
    left = width - visible_width(name) - len(ends)
    bar = min(_BAR, left - visible_width(numbers) - 4) if numbers else min(_BAR, left - 2)
    if bar < _SHORTEST_BAR:
        bar = 0
    done = 0 if share is None else round(bar * min(max(share, 0.0), 1.0))
    pieces = [(name, "bold")]
    if bar:
        pieces += [("  ", ""), ("━" * done, "cyan"), ("━" * (bar - done), "bright_black")]
        left -= bar + 2
    if count:
        pieces.append((f"  {count}", "dim"))
    if numbers and left > 6:
        pieces.append((f"  {shorten(numbers, left - 2)}", ""))
    pieces.append((f"  {elapsed}", "yellow"))
    return pieces


class BarDisplay:
    """One line per finished step, a bar with the numbers that matter for the one at work."""

    def __init__(self, terminal: Terminal, plan: Plan) -> None:
        from rich.console import Console
        from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
        from rich.text import Text

        console = Console(file=terminal.stream, highlight=False, no_color=not terminal.color)

        class Line(ProgressColumn):
            def render(self, task: Task) -> Text:
                fields = task.fields
                share = task.completed / task.total if task.total else None
                elapsed = clock(task.finished_time if task.finished else task.elapsed)
                # What stands before it, and a column to spare: a line as wide as the terminal wraps in some.
                width = console.width - 5
                pieces = bar_line(width, fields["name"], share, fields["count"], fields["numbers"], elapsed)
                return Text.assemble(*pieces, no_wrap=True)

        self._terminal = terminal
        self._width = max((len(step.key) for step in plan.steps), default=10)
        self._console = console
        self._progress = Progress(
            TextColumn(" "),
            SpinnerColumn(style="cyan"),
            Line(),
            console=console,
            transient=True,
            refresh_per_second=8,
        )
        self._tasks: dict[str, Any] = {}
        self._numbers: dict[str, str] = {}
        self._signals: set[tuple[str, str]] = set()
        self._progress.start()

    def __call__(self, record: Record) -> None:
        """Redraw for a record."""
        handler = getattr(self, f"_on_{record['kind']}", None)
        if handler is not None:
            handler(record)

    def close(self) -> None:
        """Remove the bars."""
        self._progress.stop()

    def _on_step_started(self, record: Record) -> None:
        # Names of one width keep the bars of steps under each other, where there is room for that.
        room = self._console.width >= _WIDE
        name = record["step"].ljust(self._width) if room else record["step"]
        self._tasks[record["step"]] = self._progress.add_task(
            "", total=None, name=name, count="", numbers="continues" if record.get("resumed") else ""
        )

    def _on_progress(self, record: Record) -> None:
        task = self._tasks.get(record["step"])
        if task is None:
            return
        total, completed = record["total"], record["completed"]
        count = f"{number(completed)}/{number(total)}" if total else ""
        numbers = self._numbers.get(record["step"]) or printable(record["description"])
        self._progress.update(task, total=total, completed=completed, count=count, numbers=numbers)

    def _on_metrics(self, record: Record) -> None:
        text = headline(record["values"])
        task = self._tasks.get(record["step"])
        if text and task is not None:
            self._numbers[record["step"]] = text
            self._progress.update(task, numbers=text)

    def _on_step_waiting(self, record: Record) -> None:
        holder = record["holder"]
        who = f"run {holder['run']}" if "run" in holder else f"process {holder.get('pid', '?')}"
        self._say(f"  {self._terminal.style('waiting', 'yellow')} for {who}, which makes the same artifact")

    def _on_step_cached(self, record: Record) -> None:
        if record["reason"] != "cached":
            self._finish(record["step"], "reused", record["reason"])

    def _on_step_finished(self, record: Record) -> None:
        self._finish(record["step"], duration(record["seconds"]), self._numbers.pop(record["step"], ""))

    def _on_step_failed(self, record: Record) -> None:
        self._remove(record["step"])
        mark = self._terminal.style("✗", "red")
        self._say(f"  {mark} {record['step'].ljust(self._width)}  {self._terminal.style('failed', 'red')}")

    def _on_signal(self, record: Record) -> None:
        from nemotron_steps.runs.lines import signal_text

        if (record["step"], record["name"]) in self._signals:
            return
        self._signals.add((record["step"], record["name"]))
        text = signal_text(record["name"], record["numbers"])
        mark = self._terminal.style("▲", "yellow")
        self._say(f"  {mark} {record['step'].ljust(self._width)}  {printable(text)}")

    def _on_warning(self, record: Record) -> None:
        self._say(f"  {self._terminal.style('▲', 'yellow')} {printable(record['text'])}")

    def _on_waiting(self, record: Record) -> None:
        self._say(f"  {self._terminal.style(printable(record['text']), 'dim')}")

    def _finish(self, step: str, took: str, numbers: str) -> None:
        self._remove(step)
        mark = self._terminal.style("✓", "green")
        text = f"  {mark} {step.ljust(self._width)}  {took.rjust(12)}"
        self._say(f"{text}  {self._terminal.style(printable(numbers), 'dim')}" if numbers else text)

    def _remove(self, step: str) -> None:
        task = self._tasks.pop(step, None)
        if task is not None:
            self._progress.remove_task(task)

    def _say(self, text: str) -> None:
        from rich.text import Text

        self._console.print(Text.from_ansi(text), soft_wrap=True)


def _line(record: Record) -> str | None:
    """A record as one line; None for what is not worth one."""
    from nemotron_steps.runs.lines import render

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
