"""A run in the terminal while it works: `steps watch RUN` by its files alone, and the lines of `steps run`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemotron_steps.cli.errors import exit_code, render
from nemotron_steps.cli.history import COLORS, advice, headline, job_lines, say_on_stderr
from nemotron_steps.cli.terminal import Terminal, duration, number, shorten
from nemotron_steps.runs.log_format import render as record_line
from nemotron_steps.runs.log_format import signal_text
from nemotron_steps.runs.report.follow import Follower, StepSeen, training_steps
from nemotron_steps.session.jobs import AT_WORK, JobView, printable
from nemotron_steps.session.session import Session

if TYPE_CHECKING:
    import argparse

    from rich.live import Live

    from nemotron_steps.runs.context import Record
    from nemotron_steps.runs.run_folder import RunInfo

_EVERY_S = 1.0
_ROWS = {
    "reward": "reward/mean",
    "validation": "validation/reward",
    "accuracy": "accuracy",
    "KL": "kl_penalty",
    "loss": "loss",
    "val. loss": "validation_loss",
    "entropy": "entropy",
    "entropy ≈": "approx_entropy",
    "length": "response_length/mean",
    "lag": "policy_lag/mean",
    "mismatch": "token_mult_prob_error",
    "grad norm": "grad_norm",
}
_SECONDS_BETWEEN_LINES = 5.0
_BLOCKS = "▁▂▃▄▅▆▇█"
_MARKS = {"ran": "✓", "cached": "✓", "reused": "✓", "running": "●", "failed": "✗"}


def watch(args: argparse.Namespace) -> int:
    """`steps watch [RUN]`. Returns the exit code that the run ends with; 0 with --once and where the user leaves."""
    from nemotron_steps.errors import WorkerLostError
    from nemotron_steps.runs.launch import error_of

    store = Session(args.home).store
    drawn = sys.stdout.isatty() and not args.once
    view = JobView(store, args.run, *([] if drawn or args.once else [say_on_stderr]))
    info = view.look()
    folder = store.backend.scratch / "runs" / info.id
    follower, configs = Follower(folder), _RunConfigs(folder)
    out = Terminal.of()

    def lines() -> list[str]:
        return picture(info, follower, out, configs, samples=args.samples, view=view)

    if args.once:
        follower.look()
        if info.status in AT_WORK:
            view.ask(info)
        for line in lines():
            out.print(line if out.width is None else shorten(line, out.width))
        return 0
    display = LineDisplay(out)
    try:
        with _live(out, lines, auto_refresh=False) if drawn else nullcontext() as live:
            while True:
                # Read after the state was: what was written meanwhile is not missed.
                for record in follower.look():
                    if live is None:
                        display(record)
                if live is not None:
                    live.refresh()
                if info.status not in AT_WORK:
                    break
                time.sleep(_EVERY_S)
                info = view.now(info)
    except KeyboardInterrupt:
        info = view.look()
    if info.status in AT_WORK:
        out.print(f"{info.id} goes on: {out.style(f'steps watch {info.id}', 'cyan')}")
        return 0
    status = out.style(info.status, COLORS.get(info.status, "dim"))
    out.print(f"{out.style(info.id, 'bold')}  {status}")
    failure = error_of(info)
    if failure is not None:
        render(failure, Terminal.of(sys.stderr))
        return exit_code(failure)
    for hint in advice(info, has_metrics=True):
        out.print(f"  {out.style(hint, 'cyan')}")
    return 0 if info.status == "done" else WorkerLostError.exit_code


def picture(
    info: RunInfo,
    follower: Follower,
    out: Terminal,
    configs: _RunConfigs,
    *,
    samples: bool = False,
    view: JobView | None = None,
) -> list[str]:
    """The lines of one look at the run; of its job where there is a `view` of it."""
    style = out.style
    ran_for = (time.time() if info.status in AT_WORK else info.updated) - (follower.started or info.created)
    status = style(info.status, COLORS.get(info.status, "dim"))
    lines = [f"{style(info.id, 'bold')}  {status}  {printable(info.title)}  {style(duration(max(ran_for, 0)), 'dim')}"]
    lines += job_lines(view, info, out) if view is not None else ()
    width = max((len(key) for key in info.steps), default=0)
    for key, step in info.steps.items():
        state = str(step.get("state", "pending"))
        if state == "running" and info.status not in AT_WORK:
            state = info.status
        note = duration(step["seconds"]) if step.get("seconds") is not None else ""
        if state == "running":
            note = _pace(follower.steps.get(key, StepSeen()), configs.total(key))
        color = COLORS.get(state, "dim")
        mark = style(_MARKS.get(state, "○"), color)
        lines.append(f"  {mark} {key.ljust(width)}  {style(state, color)}  {style(note, 'dim')}")
    # The step that works is shown, else the last that reported something.
    reported = [key for key in info.steps if key in follower.steps and follower.steps[key].curves]
    working = [key for key in reported if info.steps[key].get("state") == "running"]
    shown = (working or reported[-1:])[:1]
    if shown:
        lines += ["", *_curves(follower.steps[shown[0]], out)]
    lines += _warnings(follower, out, configs)
    if samples and shown:
        lines += _samples(follower.steps[shown[0]], out)
    return lines


def _pace(seen: StepSeen, total: int | None) -> str:
    """`step 42/100  12.3 s a step  12 min 05 s left`."""
    if seen.index is None:
        return ""
    parts = [f"step {seen.index}/{total}" if total else f"step {seen.index}"]
    pace = seen.seconds_per_step
    if pace is not None:
        parts.append(f"{duration(pace)} a step")
        if total and seen.index < total:
            parts.append(f"{duration(pace * (total - seen.index))} left")
    return "  ".join(parts)


def _curves(seen: StepSeen, out: Terminal) -> Iterator[str]:
    room = min((out.width or 100) - 30, 60)
    for label, name in _ROWS.items():
        if name in seen.curves:
            values = seen.curves[name].values
            line = sparkline(values, room)
            yield f"  {out.style(label.ljust(10), 'dim')} {number(values[-1]).rjust(10)}  {line}".rstrip()


def sparkline(values: Sequence[float], width: int) -> str:
    """The values as blocks of eight heights, in at most `width` columns: means where there are more values."""
    finite = [value for value in values if value - value == 0]
    if not finite or width < 1:
        return ""
    if len(finite) > width:
        edges = [len(finite) * column // width for column in range(width + 1)]
        finite = [sum(finite[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(finite), max(finite)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((value - low) * scale)] for value in finite)


def _warnings(follower: Follower, out: Terminal, configs: _RunConfigs) -> Iterator[str]:
    found = [(key, name, numbers) for key, seen in follower.steps.items() for name, numbers in seen.signals.items()]
    if found or follower.warnings:
        yield ""
    for key, name, numbers in found[-5:]:
        yield f"  {out.style('▲ ' + printable(signal_text(name, numbers)), 'yellow')}"
        yield f"      {out.style(configs.advice(key, name, numbers), 'cyan')}"
    for text in follower.warnings:
        yield f"  {out.style('▲', 'yellow')} {printable(text)}"


def _samples(seen: StepSeen, out: Terminal) -> Iterator[str]:
    for which, sample in seen.samples.items():
        reward = sample.get("reward")
        said = f"  reward {number(reward)}" if isinstance(reward, int | float) else ""
        head = f"{which}, step {sample.get('step', '?')}{said}"
        yield from ("", f"  {out.style(printable(head), 'dim')}")
        for key in ("prompt", "response"):
            text = sample.get(key)
            if text is not None:
                yield f"  {key.rjust(8)}  {' '.join(printable(str(text)).split())[:400]}"


class _RunConfigs:
    """The configs of a run's steps, read once they are written, and what manifests advise."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._advice: dict[tuple[str, str], str] = {}
        self._steps: dict[str, tuple[str, Mapping[str, Any]]] = {}
        """Step key → step id and config."""

    def total(self, key: str) -> int | None:
        """`max_num_steps` of a step's config; None where it has none, or nothing is written yet."""
        _, config = self._step(key)
        return training_steps(config)

    def advice(self, key: str, signal: str, numbers: Mapping[str, Any]) -> str:
        """The overrides that the step's manifest has for a signal; else where it is explained."""
        from nemotron_steps.manifest.registry import load_registry
        from nemotron_steps.runs.hints import Signal, hints_for_signals

        if (key, signal) not in self._advice:
            step_id, config = self._step(key)
            manifest = load_registry().find_step(step_id) if config else None
            found = hints_for_signals([Signal(signal, numbers)], manifest, config) if manifest is not None else []
            overrides = "; ".join(" ".join(hint.overrides) for hint in found if hint.overrides)
            self._advice[key, signal] = overrides or f"steps explain {signal}"
        return self._advice[key, signal]

    def _step(self, key: str) -> tuple[str, Mapping[str, Any]]:
        if not self._steps and (self._folder / "config.yaml").is_file():
            import yaml

            configs = yaml.safe_load((self._folder / "config.yaml").read_text(encoding="utf-8"))
            plan = json.loads((self._folder / "plan.json").read_bytes())
            self._steps = {step["key"]: (step["step"], configs.get(step["key"]) or {}) for step in plan["steps"]}
        return self._steps.get(key, ("", {}))


class LineDisplay:
    """Timestamped lines; of metrics and progress one every few seconds at most, and the latest before any other."""

    def __init__(self, out: Terminal) -> None:
        self._terminal = out
        self._last = 0.0
        self._held: Record | None = None

    def __call__(self, record: Record) -> None:
        """Print a record, or hold it back; not what is said at the run's end."""
        kind = record["kind"]
        if kind in ("sample", "run_finished", "summary"):
            return
        if kind in ("metrics", "progress"):
            if kind == "progress" and self._held is not None and self._held["kind"] == "metrics":
                return
            now = time.monotonic()
            if now - self._last < _SECONDS_BETWEEN_LINES:
                self._held = record
                return
            self._last = now
        elif self._held is not None:
            self._write(self._held)
        self._held = None
        self._write(record)

    def _write(self, record: Record) -> None:
        kind, text = record["kind"], record_line(record)
        if kind == "progress":
            count = f" {number(record['completed'])}/{number(record['total'])}" if record["total"] else ""
            text = f"[{record['step']}] {record['description']}{count}"
        elif kind == "warning":
            text = f"▲ {record['text']}"
        elif kind == "metrics" and (numbers := headline(record["values"])):
            text = f"[{record['step']}] step {record['index']}: {numbers}"
        if text is not None:
            stamp = time.strftime("%H:%M:%S", time.localtime(record["time"]))
            self._terminal.print(f"{stamp} {printable(text)}")
            self._terminal.stream.flush()


def _live(out: Terminal, lines: Callable[[], list[str]], **options: Any) -> Live:
    """A part of the screen that shows lines, as many and as much of each as fit."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(file=out.stream, highlight=False, no_color=not out.color)

    def drawn() -> Text:
        out.width = console.width
        return Text.from_ansi("\n".join(shorten(line, console.width) for line in lines()[: console.height]))

    return Live(console=console, get_renderable=drawn, transient=True, **options)
