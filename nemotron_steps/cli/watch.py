"""A run in the terminal while it works: to `steps watch RUN` from any terminal by its files alone, and to `steps run`.

Where `steps watch` has no terminal, what is new is printed as lines; with `--once`, a picture of this moment.
"""

from __future__ import annotations

import json
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemotron_steps.cli.errors import exit_code, render
from nemotron_steps.cli.history import COLORS, advice, headline, job_lines, say_on_stderr
from nemotron_steps.cli.terminal import Terminal, duration, number, shorten
from nemotron_steps.runs.log_format import render as record_line
from nemotron_steps.runs.log_format import signal_text
from nemotron_steps.runs.report.follow import Follower, StepSeen
from nemotron_steps.session.jobs import AT_WORK, JobView, not_started, printable
from nemotron_steps.session.session import Session

if TYPE_CHECKING:
    import argparse

    from rich.console import Console
    from rich.text import Text

    from nemotron_steps.artifacts.store import ArtifactStore
    from nemotron_steps.resolver.plan import Plan
    from nemotron_steps.runs.context import Record
    from nemotron_steps.runs.run_folder import RunInfo

_EVERY_S = 1.0
_EACH_SECOND = 4
"""How often a run of this process is redrawn."""
_ROWS = (
    ("reward", ("reward/mean",)),
    ("validation", ("validation/reward",)),
    ("accuracy", ("accuracy",)),
    ("KL", ("kl_penalty",)),
    ("loss", ("loss",)),
    ("val. loss", ("validation_loss",)),
    ("entropy", ("entropy", "approx_entropy")),
    ("length", ("response_length/mean",)),
    ("lag", ("policy_lag/mean",)),
    ("mismatch", ("token_mult_prob_error",)),
    ("grad norm", ("grad_norm",)),
)
"""Label → the metrics it may be, the first that there is."""
_SECONDS_BETWEEN_LINES = 5.0
_BLOCKS = "▁▂▃▄▅▆▇█"
_STATES = {"step_started": "running", "step_waiting": "waiting", "step_finished": "ran", "step_failed": "failed"}
"""What a record makes of its step."""
_MARKS = {"ran": "✓", "cached": "✓", "reused": "✓", "running": "●", "failed": "✗"}


def watch(arguments: argparse.Namespace) -> int:
    """`steps watch [RUN]`. Returns the exit code that the run ends with; 0 with --once and where the user leaves."""
    store = Session(arguments.home).store
    drawn = sys.stdout.isatty() and not arguments.once
    view = JobView(store, arguments.run, *([] if drawn or arguments.once else [say_on_stderr]))
    info = view.look()
    folder = store.backend.scratch / "runs" / info.id
    follower, configs = Follower(folder), _RunConfigs(folder)
    terminal = Terminal.of()
    if arguments.once:
        follower.look()
        if info.status in AT_WORK:
            view.ask(info)
        for line in picture(info, follower, terminal, configs, samples=arguments.samples, view=view):
            terminal.print(line if terminal.width is None else shorten(line, terminal.width))
        return 0
    try:
        if drawn:
            info = _draw(store, info, follower, terminal, configs, view, samples=arguments.samples)
        else:
            info = _print_lines(store, info, follower, terminal, view)
    except KeyboardInterrupt:
        info = view.look()
    if info.status in AT_WORK:
        terminal.print(f"{info.id} goes on: {terminal.style(f'steps watch {info.id}', 'cyan')}")
        return 0
    return _ended(info, terminal)


def picture(
    info: RunInfo,
    follower: Follower,
    terminal: Terminal,
    configs: _RunConfigs,
    *,
    samples: bool,
    curves: bool = True,
    view: JobView | None = None,
    now: float | None = None,
) -> list[str]:
    """The lines of one look at the run.

    Args:
        configs: what its steps were configured with.
        curves: whether its numbers are shown.
        view: what there is to say of its job.
        now: Unix seconds.
    """
    now = time.time() if now is None else now
    style = terminal.style
    ran_for = (now if info.status in AT_WORK else info.updated) - (follower.started or info.created)
    status = style(info.status, *([COLORS[info.status]] if info.status in COLORS else ["dim"]))
    lines = [f"{style(info.id, 'bold')}  {status}  {printable(info.name)}  {style(duration(max(ran_for, 0)), 'dim')}"]
    lines += job_lines(view, info, terminal) if view is not None else ()
    width = max((len(key) for key in info.steps), default=0)
    for key, step in info.steps.items():
        state = str(step.get("state", "pending"))
        if state == "running" and info.status not in AT_WORK:
            state = info.status
        mark = style(_MARKS.get(state, "○"), COLORS.get(state, "dim"))
        seen = follower.steps.get(key, StepSeen())
        took = duration(step["seconds"]) if step.get("seconds") is not None else ""
        note = _pace(seen, configs.total(key)) if state == "running" else took
        lines.append(f"  {mark} {key.ljust(width)}  {style(state, COLORS.get(state, 'dim'))}  {style(note, 'dim')}")
    shown = _at_work(info, follower)
    if curves and shown is not None:
        lines += ["", *_curves(follower.steps[shown], terminal)]
    lines += _warnings(follower, terminal, configs)
    if samples and shown is not None:
        lines += _samples(follower.steps[shown], terminal)
    return lines


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


def _pace(seen: StepSeen, total: int | None) -> str:
    """`step 42/100  12.3 s a step  12 min 05 s left`."""
    if seen.index is None:
        return printable(seen.progress)
    parts = [f"step {seen.index}/{total}" if total else f"step {seen.index}"]
    pace = seen.seconds_per_step
    if pace is not None:
        parts.append(f"{duration(pace)} a step")
        if total and seen.index < total:
            parts.append(f"{duration(pace * (total - seen.index))} left")
    return "  ".join(parts)


def _at_work(info: RunInfo, follower: Follower) -> str | None:
    """The step to show: the one that works, else the last that reported something."""
    reported = [key for key in info.steps if key in follower.steps and follower.steps[key].curves]
    working = [key for key in reported if info.steps[key].get("state") == "running"]
    return next(iter(working), reported[-1] if reported else None)


def _curves(seen: StepSeen, terminal: Terminal) -> Iterator[str]:
    room = min((terminal.width or 100) - 30, 60)
    for label, names in _ROWS:
        curve = next((seen.curves[name] for name in names if name in seen.curves), None)
        if curve is None or not curve.points:
            continue
        line = sparkline(curve.values, room) if terminal.unicode else ""
        yield f"  {terminal.style(label.ljust(10), 'dim')} {number(curve.values[-1]).rjust(10)}  {line}".rstrip()


def _warnings(follower: Follower, terminal: Terminal, configs: _RunConfigs) -> Iterator[str]:
    found = [(key, name, numbers) for key, seen in follower.steps.items() for name, numbers in seen.signals.items()]
    if found or follower.warnings:
        yield ""
    for key, name, numbers in found[-5:]:
        yield f"  {terminal.style('▲ ' + printable(signal_text(name, numbers)), 'yellow')}"
        yield f"      {terminal.style(configs.advice(key, name, numbers), 'cyan')}"
    for text in follower.warnings:
        yield f"  {terminal.style('▲', 'yellow')} {printable(text)}"


def _samples(seen: StepSeen, terminal: Terminal) -> Iterator[str]:
    for which, sample in seen.samples.items():
        reward = sample.get("reward")
        said = f"  reward {number(reward)}" if isinstance(reward, int | float) else ""
        yield ""
        head = f"{which}, step {sample.get('step', '?')}{said}"
        yield f"  {terminal.style(printable(head), 'dim')}"
        for key in ("prompt", "response"):
            text = sample.get(key)
            if text is not None:
                yield f"  {key.rjust(8)}  {' '.join(printable(str(text)).split())[:400]}"


class _RunConfigs:
    """What the run was asked for: its steps' configs, by its plan or read once they are written, and what manifests
    advise."""

    def __init__(self, folder: Path, plan: Plan | None = None) -> None:
        self._folder = folder
        self._advice: dict[tuple[str, str], str] = {}
        self._steps: dict[str, tuple[str, Mapping[str, Any]]] = {}
        """Step key → step id and config."""
        if plan is not None:
            self._steps = {step.key: (step.step_id, step.config) for step in plan.steps}

    def total(self, key: str) -> int | None:
        """`max_num_steps` of a step's config; None where it has none, or nothing is written yet."""
        config = self._config(key)
        sections = [config, *(section for section in config.values() if isinstance(section, dict))]
        counts = [section.get("max_num_steps") for section in sections]
        return next((count for count in counts if isinstance(count, int)), None)

    def advice(self, key: str, signal: str, numbers: Mapping[str, Any]) -> str:
        """The overrides that the step's manifest has for a signal; else where it is explained."""
        if (key, signal) not in self._advice:
            self._advice[key, signal] = self._overrides(key, signal, numbers) or f"steps explain {signal}"
        return self._advice[key, signal]

    def _overrides(self, key: str, signal: str, numbers: Mapping[str, Any]) -> str:
        from nemotron_steps.manifest.registry import load_registry
        from nemotron_steps.runs.hints import Signal, hints_for_signals

        config = self._config(key)
        manifest = load_registry().find_step(self._steps[key][0]) if config else None
        found = hints_for_signals([Signal(signal, numbers)], manifest, config) if manifest is not None else []
        return "; ".join(" ".join(hint.overrides) for hint in found if hint.overrides)

    def _config(self, key: str) -> Mapping[str, Any]:
        if not self._steps and (self._folder / "config.yaml").is_file():
            import yaml

            configs = yaml.safe_load((self._folder / "config.yaml").read_text(encoding="utf-8"))
            plan = json.loads((self._folder / "plan.json").read_bytes())
            self._steps = {step["key"]: (step["step"], configs.get(step["key"]) or {}) for step in plan["steps"]}
        return self._steps.get(key, ("", {}))[1]


def open_display(terminal: Terminal, plan: Plan) -> PictureDisplay | LineDisplay:
    """The display for a terminal: a picture when it can redraw, lines otherwise."""
    if terminal.stream.isatty() and terminal.unicode:
        return PictureDisplay(terminal, plan)
    return LineDisplay(terminal)


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
    return record_line(record)


class PictureDisplay:
    """The picture of a run of this process, redrawn as it works. Its steps and warnings stay on the screen."""

    def __init__(self, terminal: Terminal, plan: Plan) -> None:
        from rich.live import Live

        from nemotron_steps.runs.run_folder import RunInfo

        steps = {step.key: {"state": "pending"} for step in plan.steps}
        self._info = RunInfo("", name=plan.name, steps=steps, created=time.time())
        self._terminal, self._seen, self._configs = terminal, Follower(), _RunConfigs(Path(), plan)
        self._lock = threading.Lock()  # it is drawn by a thread of rich's
        self._console = console = _console(terminal)
        self._live = Live(console=console, get_renderable=self._drawn, transient=True, refresh_per_second=_EACH_SECOND)
        self._live.start()

    def __call__(self, record: Record) -> None:
        """Take over what the run recorded."""
        with self._lock:
            self._seen.apply(record)
            kind, step = record["kind"], self._info.steps.get(record["step"], {})
            if kind == "run_started":
                self._info = replace(self._info, id=record["run"])
            elif kind == "step_cached":
                step["state"] = "cached" if record["reason"] == "cached" else "reused"
            elif kind in _STATES:
                step.update(state=_STATES[kind], seconds=record.get("seconds"))

    def close(self) -> None:
        """Leave what became of each step."""
        self._live.stop()
        self._terminal.print("\n".join(self._lines(curves=False)[1:]))

    def _drawn(self) -> Text:
        with self._lock:
            self._terminal.width = self._console.width
            return _fitted(self._lines(), self._console)

    def _lines(self, *, curves: bool = True) -> list[str]:
        return picture(self._info, self._seen, self._terminal, self._configs, samples=False, curves=curves)


def _draw(
    store: ArtifactStore,
    info: RunInfo,
    follower: Follower,
    terminal: Terminal,
    configs: _RunConfigs,
    view: JobView,
    *,
    samples: bool,
) -> RunInfo:
    """Redraw once a second until the run ends or the user leaves."""
    from rich.live import Live

    keys = "s samples   q leave, the run goes on"
    console = _console(terminal)
    with Live(console=console, auto_refresh=False, transient=True) as live, _keys() as pressed:
        while True:
            follower.look()
            terminal.width = console.width
            lines = picture(info, follower, terminal, configs, samples=samples, view=view)
            live.update(_fitted([*lines, "", terminal.style(keys, "dim")], console), refresh=True)
            if info.status not in AT_WORK:
                return info
            key = pressed(_EVERY_S)
            samples = samples != (key == "s")
            if key == "q":
                return info
            info = _now(store, info, view)


def _console(terminal: Terminal) -> Console:
    from rich.console import Console

    return Console(file=terminal.stream, highlight=False, no_color=not terminal.color)


def _fitted(lines: Sequence[str], console: Console) -> Text:
    from rich.text import Text

    return Text.from_ansi("\n".join(shorten(line, console.width) for line in lines[: console.height]))


def _print_lines(store: ArtifactStore, info: RunInfo, follower: Follower, terminal: Terminal, view: JobView) -> RunInfo:
    """Print what is new as lines until the run ends."""
    display = LineDisplay(terminal)
    while True:
        # Read after the state was: what was written meanwhile is not missed.
        for record in follower.look():
            display(record)
        if info.status not in AT_WORK:
            display.close()
            return info
        time.sleep(_EVERY_S)
        info = _now(store, info, view)


def _now(store: ArtifactStore, info: RunInfo, view: JobView) -> RunInfo:
    """The run as it is now. RequestError if its job ended before the run began: the run itself never says so."""
    from nemotron_steps.runs.run_folder import get_run

    if not view.due(info):
        return get_run(store, info.id)
    job_ended = view.never_began(info)
    # Read after the job's end was seen: it may have begun and ended meanwhile.
    now = view.look()
    if job_ended and now.status == "submitted":
        raise not_started(store, now)
    return now


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """A function that waits so many seconds for a key and returns it, "" for none."""
    if not sys.stdin.isatty():

        def no_key(seconds: float) -> str:
            time.sleep(seconds)
            return ""

        yield no_key
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield lambda seconds: sys.stdin.read(1) if select.select([sys.stdin], [], [], seconds)[0] else ""
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _ended(info: RunInfo, terminal: Terminal) -> int:
    """Say how the run ended; the exit code it means."""
    from nemotron_steps.errors import WorkerLostError
    from nemotron_steps.runs.launch import error_of

    status = terminal.style(info.status, *([COLORS[info.status]] if info.status in COLORS else []))
    terminal.print(f"{terminal.style(info.id, 'bold')}  {status}")
    failure = error_of(info)
    if failure is not None:
        render(failure, Terminal.of(sys.stderr))
        return exit_code(failure)
    for hint in advice(info, has_metrics=True):
        terminal.print(f"  {terminal.style(hint, 'cyan')}")
    return 0 if info.status == "done" else WorkerLostError.exit_code
