"""A run's files read as they grow, by a process that does not write them: `steps watch`, `steps logs -f`. A line that
is still being written, or that a kill cut off, waits for its end."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemotron_steps.runs.log_format import render
from nemotron_steps.runs.run_folder import parse_lines

_KEPT = 512
"""Training steps that are kept of each metric."""
_RATE_OVER = 20
"""Training steps that the rate is measured over."""


@dataclass
class Tail:
    """What a growing file of lines has beyond what was read; a file that is not there yet has nothing."""

    path: Path
    offset: int = 0

    def new(self) -> list[bytes]:
        """The whole lines since the last look: one still being written stays for the next."""
        data = self._read()
        whole = data[: data.rfind(b"\n") + 1]
        self.offset += len(whole)
        return whole.splitlines()

    def rest(self) -> list[bytes]:
        """All there is; a kill may have cut the last line short."""
        return self._read().splitlines()

    def _read(self) -> bytes:
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                return file.read()
        except FileNotFoundError:
            return b""


class Curve:
    """The last values of one metric."""

    def __init__(self) -> None:
        self.points: deque[tuple[float, float]] = deque(maxlen=_KEPT)

    def add(self, index: float, value: float) -> None:
        """The newest value. A resumed run repeats some training steps, for which the later report counts, and step 0,
        what was measured before the training."""
        if index == 0 and self.points:
            return
        while self.points and self.points[-1][0] >= index:
            self.points.pop()
        self.points.append((index, value))

    @property
    def values(self) -> list[float]:
        """Oldest first."""
        return [value for _, value in self.points]


@dataclass
class StepSeen:
    """What a step of the run has reported so far."""

    index: int | None = None
    curves: dict[str, Curve] = field(default_factory=dict)
    times: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_RATE_OVER + 1))
    signals: dict[str, dict[str, Any]] = field(default_factory=dict)
    samples: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Which (best, worst, …) → the latest of it."""

    @property
    def seconds_per_step(self) -> float | None:
        """Of the last training steps; None before there are two."""
        if len(self.times) < 2:
            return None
        (first, began), (last, ended) = self.times[0], self.times[-1]
        return (ended - began) / (last - first) if last > first and ended > began else None


def training_steps(config: Mapping[str, Any]) -> int | None:
    """`max_num_steps` of a step's config; None where it has none."""
    sections = [config, *(section for section in config.values() if isinstance(section, Mapping))]
    return next((each for section in sections if isinstance(each := section.get("max_num_steps"), int)), None)


class Follower:
    """What a run has recorded, kept up to date by `look`."""

    def __init__(self, folder: Path) -> None:
        self.steps: dict[str, StepSeen] = {}
        self.warnings: deque[str] = deque(maxlen=5)
        self.started: float | None = None
        """When the present attempt began, in Unix seconds."""
        self._tails = [Tail(folder / f"{name}.jsonl") for name in ("events", "metrics", "samples")]

    def look(self) -> list[dict[str, Any]]:
        """Read what is new; returns the new records, in the order of time."""
        new = [record for tail in self._tails for record in parse_lines(tail.new())]
        new = [r for r in new if isinstance(r.get("time"), int | float) and isinstance(r.get("kind"), str)]
        for record in new:
            self.apply(record)
        return sorted(new, key=lambda record: float(record["time"]))

    def apply(self, record: Mapping[str, Any]) -> None:
        """Take over the newest record."""
        kind, step = record["kind"], self.steps.setdefault(str(record.get("step", "")), StepSeen())
        if kind == "run_started":
            self.started = float(record["time"])
            self.warnings.clear()
            for seen in self.steps.values():
                seen.signals.clear()
        elif kind == "metrics":
            index = int(record["index"])
            if step.times and step.times[-1][0] >= index:
                step.times.clear()  # begun again from a checkpoint
            step.index = index
            step.times.append((index, float(record["time"])))
            for name, value in record["values"].items():
                if isinstance(value, int | float) and not isinstance(value, bool):
                    step.curves.setdefault(name, Curve()).add(index, float(value))
        elif kind == "signal":
            step.signals[str(record["name"])] = dict(record["numbers"])
        elif kind in ("warning", "waiting"):
            self.warnings.append(str(record["text"]))
        elif kind == "step_waiting":
            self.warnings.append(str(render(dict(record))))
        elif kind == "sample":
            sample = record["sample"]
            step.samples[str(sample.get("which", "latest"))] = sample
