"""Records as plain lines of text: the log file, and the screen where there is no terminal to draw on."""

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nemotron_steps.artifacts.files import as_float
from nemotron_steps.runs.context import Record

_SHOWN_METRICS = 6
_BETTER = {
    "lower": ("loss", "kl", "error", "perplexity", "truncat", "seconds"),
    "higher": ("reward", "accuracy", "agreement", "score", "solved", "pass"),
}
"""Which way a measure is better → parts of its name."""


def render(record: Record) -> str | None:
    """One line for a record, without time; None for records that would only be noise in a log."""
    text = _text(record["kind"], record)
    return f"[{record['step']}] {text}" if text and record["step"] else text


def _text(kind: str, record: Record) -> str | None:
    match kind:
        case "run_started":
            began, count = "resumed" if record["resumed"] else "started", len(record["steps"])
            return f"run {record['run']} {began}: {record['name']}, {count} step{'s' * (count != 1)}"
        case "run_finished":
            ran, cached, took = record["ran"], record["cached"], seconds(record["seconds"])
            if ran == 0 and record["status"] == "done":
                every = f"all {cached} steps are cached" if cached > 1 else "the step is cached"
                return f"nothing to do: {every} ({took})"
            return f"run {record['status']} in {took}: {ran} step{'s' * (ran != 1)} ran, {cached} cached"
        case "step_started":
            began = "continues from its work folder" if record["resumed"] else "started"
            return f"{began} (key {record['cache_key'][:12]})"
        case "step_waiting":
            run, process, host = (record["holder"].get(name, "?") for name in ("run", "pid", "host"))
            return f"another run works on the same artifact (run {run}, process {process} on {host}): waiting for it"
        case "waiting":
            return str(record["text"])
        case "hint":
            return f"hint: {record['text']}"
        case "step_cached":
            return f"{record['reason']}: {outputs(record['outputs'])}"
        case "step_finished":
            return f"done in {seconds(record['seconds'])}: {outputs(record['outputs'])}"
        case "step_failed":
            return f"failed: {record['error']['what']}"
        case "metrics":
            shown = [f"{name}={number(value)}" for name, value in record["values"].items()]
            more = [f"(+{len(shown) - _SHOWN_METRICS} more)"] if len(shown) > _SHOWN_METRICS else []
            return f"step {record['index']}: {'  '.join([*shown[:_SHOWN_METRICS], *more])}"
        case "event":
            fields = "  ".join(f"{name}={values_of(value)}" for name, value in record["fields"].items())
            return f"{record['name']}: {fields}" if fields else str(record["name"])
        case "signal":
            return "signal " + signal_text(record["name"], record["numbers"])
        case "summary":
            return "  ".join(f"{name}: {in_words(name, value)}" for name, value in record["values"].items())
    return None


class RunLog(logging.Handler):
    """Appends records and log messages to log.txt, one flushed line each, redacted."""

    def __init__(self, path: Path, redact: Callable[[str], str]) -> None:
        super().__init__(logging.INFO)
        self.setFormatter(logging.Formatter("%(name)s %(levelname)s: %(message)s"))
        self._file = path.open("a", encoding="utf-8", errors="replace", buffering=1)
        self._redact = redact
        self._order = threading.Lock()
        """Several threads write, and a line's time is that of its writing."""

    def __call__(self, record: Record) -> None:
        """Write a record of the run (it is redacted already)."""
        line = render(record)
        if line is not None:
            self._write(line)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a message of Python's logging."""
        self._write(self._redact(self.format(record)))

    def write_text(self, text: str) -> None:
        """Write text of any number of lines, such as a traceback."""
        self._write(self._redact(text.rstrip("\n")))

    def end(self) -> None:
        """Close the file."""
        # Not in `close`: a library that configures Python's logging when it is imported, as vLLM does, closes every
        # handler there is, and the run goes on.
        self._file.close()
        self.close()

    def _write(self, text: str) -> None:
        with self._order:
            self._file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")


def seconds(value: float) -> str:
    """A duration for reading: `0.8 s`, `42 s`, `3 min 05 s`, `2 h 10 min`."""
    if value < 9.95:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    hours, left = divmod(minutes, 60)
    if hours:
        return f"{hours} h {left:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def readable_size(count: float) -> str:
    """Bytes for reading: `512 B`, `3.4 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.95:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def number(value: Any) -> str:
    """A number for reading: four significant digits, an exponent only where there is no other way."""
    if not isinstance(value, float) or not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    size = math.floor(math.log10(abs(value)))
    if not -5 <= size < 6:
        return f"{value:.4g}"
    text = f"{value:.{max(0, 3 - size)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def is_table(value: Any) -> bool:
    """Whether a value of a summary is a table: row → column → number."""
    return isinstance(value, Mapping) and bool(value) and all(isinstance(row, Mapping) for row in value.values())


def columns_of(table: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Every column of a table, in the order of its first mention."""
    return list(dict.fromkeys(column for row in table.values() for column in row))


def in_words(name: str, value: Any) -> str:
    """One value of a summary: `0.31 → 0.62 (+0.31)` for a before and after, a table's size, else as `values_of`."""
    if is_table(value):
        return f"{len(value)} × {len(columns_of(value))}"
    if not is_change(value):
        return values_of(value)
    difference, _ = compared(name, value)
    return f"{number(value['before'])} → {number(value['after'])}" + (f" ({difference})" if difference else "")


def values_of(value: Any) -> str:
    """A value, or several, with their names where they have some."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {number(item)}" for key, item in value.items())
    return ", ".join(map(number, value)) if isinstance(value, list | tuple) else number(value)


def is_change(value: Any) -> bool:
    """Whether a value of a summary is a before and after."""
    return isinstance(value, Mapping) and {"before", "after"} <= value.keys()


def main_metric(summary: Mapping[str, Any]) -> dict[str, Any] | None:
    """The measure to list a step by, as {"name", "before", "after"}: the first before and after of its summary, with
    which a report begins, else the first measure of its end, without "before"; None for neither."""
    ends = {name: {"after": value} for name, value in summary.items() if "_first_" not in name and better(name, {})}
    changes = {name: value for name, value in summary.items() if is_change(value)}
    for name, value in (changes or ends).items():
        sides = {side: as_float(value.get(side)) for side in ("before", "after")}
        finite = {side: number for side, number in sides.items() if number is not None and math.isfinite(number)}
        if "after" in finite:
            return {"name": name, "before": None, **finite}
    return None


Figure = tuple[float | None, float | None]
"""The number that a measure of a summary came to, and its standard error where it has one."""


def figure(summary: Mapping[str, Any], name: str) -> Figure:
    """That of a measure: of a change the end."""
    value, errors = summary[name], None
    if is_change(value):
        value, errors = value["after"], value.get("standard_error")
    error = errors.get("after") if isinstance(errors, Mapping) else None
    return as_float(value), as_float(summary.get("standard_error") if name == "reward" else error)


def difference(name: str, first: Figure, then: Figure, value: Any = None) -> dict[str, Any]:
    """Of a measure to that of the first run, or row: "difference", its standard "error", both as "text", "verdict"."""
    way = {"better": value["better"]} if is_change(value) and "better" in value else {}
    errors = {"before": first[1], "after": then[1]}
    text, verdict = compared(name, {"before": first[0], "after": then[0], "standard_error": errors, **way})
    return {
        "difference": None if first[0] is None or then[0] is None else then[0] - first[0],
        "error": None if first[1] is None or then[1] is None else math.hypot(first[1], then[1]),
        "text": "the same" if verdict == "same" else text,
        "verdict": verdict,
    }


def metric_text(metric: Mapping[str, Any] | None) -> str:
    """A main metric: `heldout reward 0.31 → 0.62`."""
    if metric is None:
        return ""
    sides = (number(metric[side]) for side in ("before", "after") if metric[side] is not None)
    return f"{metric['name'].replace('_', ' ')} {' → '.join(sides)}"


def compared(name: str, value: Mapping[str, Any]) -> tuple[str, str]:
    """The difference of a before and after, and whether that is "good", "bad", "same", or "" for none of these.

    `+0.31 ± 0.02` where `standard_error` has those of both, taken as independent; a difference within its error is
    neither good nor bad. Empty texts for what is not a finite number.
    """
    before, after = as_float(value["before"]), as_float(value["after"])
    if before is None or after is None or not math.isfinite(after - before):
        return "", ""
    difference = after - before
    if difference == 0:
        return "no change", "same"
    errors = value.get("standard_error")
    known = [as_float(errors.get(side)) for side in ("before", "after")] if isinstance(errors, Mapping) else []
    error = math.hypot(*(each if each is not None else math.nan for each in known))
    text = f"{'+' if difference > 0 else '−'}{number(abs(difference))}" + (f" ± {number(error)}" if error > 0 else "")
    counts = value.get("samples")
    if isinstance(counts, Mapping) and counts.get("before") != counts.get("after"):
        text += f", of {number(counts.get('before'))} and {number(counts.get('after'))} samples"
    way = better(name, value)
    if not way or error >= abs(difference):
        return text, ""
    return text, "good" if (difference < 0) == (way == "lower") else "bad"


def better(name: str, value: Mapping[str, Any]) -> str:
    """Which way a before and after is an improvement: "higher", "lower", or "" for neither good nor bad by itself."""
    known = [way for way, words in _BETTER.items() if any(word in name.lower() for word in words)]
    return str(value.get("better", next(iter(known), "")))


def outputs(references: Mapping[str, str]) -> str:
    """`policy = rl/nemo_rl/rlhf/policy:v1`, comma-separated."""
    return ", ".join(f"{port} = {ref}" for port, ref in references.items())


def signal_text(name: str, numbers: Mapping[str, Any], times: int = 1) -> str:
    """A signal: `kl_spike at step 12: KL to ...` where it says what it saw, else its numbers in parentheses."""
    if "message" in numbers:
        at = f" at step {numbers['step']}" if "step" in numbers else ""
        often = f" ({times} times)" if times > 1 else ""
        return f"{name}{at}: {numbers['message']}{often}"
    parts = [f"{key}={number(value)}" for key, value in numbers.items()]
    if times > 1:
        parts.append(f"{times} times")
    return f"{name} ({', '.join(parts)})" if parts else name
