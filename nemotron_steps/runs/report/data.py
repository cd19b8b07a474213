"""What a run recorded, read back into the shape the report shows."""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemotron_steps.artifacts.files import is_run_id
from nemotron_steps.artifacts.models import Artifact
from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.errors import ArtifactError, StepsError, UnknownNameError
from nemotron_steps.runs.run_folder import RUN_FILE, keys_of, parse_lines, read_events

_TIMING = "timing/"
_WHOLE_STEP = "timing/step_s"


@dataclass
class StepReport:
    """One step of the run: its plan entry, how it went, and what it reported."""

    key: str
    plan: Mapping[str, Any]
    state: str = "pending"
    seconds: float | None = None
    outputs: dict[str, str] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    curves: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)
    signals: dict[str, dict[str, Any]] = field(default_factory=dict)
    hints: list[dict[str, Any]] = field(default_factory=list)
    error: dict[str, Any] | None = None
    traceback: str = ""
    cache_key: str | None = None
    made_by: str = ""
    """The earlier run that made a cached step; its curves and samples are shown."""


@dataclass
class RunReport:
    """Everything the page shows."""

    id: str
    name: str
    status: str
    created: float
    seconds: float
    attempts: int
    request: Mapping[str, Any]
    error: dict[str, Any] | None
    goals: list[str]
    steps: list[StepReport]
    config: str
    traceback: str
    """Of a failure outside any step."""
    artifacts: dict[str, Artifact]
    """Reference → record, for every output that can still be found."""


def read_report(folder: Path, store: ArtifactStore) -> RunReport:
    """Read a run folder; files that a run which ended early did not write count as empty."""
    try:
        return _read(folder, store)
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RecursionError) as error:
        if isinstance(error, StepsError):
            raise
        raise ArtifactError(
            "the run's records are not what a run writes", where=str(folder), found=f"{type(error).__name__}: {error}"
        ) from error


def _read(folder: Path, store: ArtifactStore) -> RunReport:
    info = _json(folder / RUN_FILE)
    plan = _json(folder / "plan.json")
    events = _lines(folder / "events.jsonl")
    steps: dict[str, StepReport] = {}
    for entry in plan.get("steps", []):
        key, state = entry["key"], {"state": "pending", "outputs": {}, **info.get("steps", {}).get(entry["key"], {})}
        known: dict[str, Any] = {name: state.get(name) for name in ("state", "seconds", "cache_key")}
        steps[key] = StepReport(key, entry, **known, outputs=dict(state["outputs"]))
    _apply_events(steps, events)
    _apply_metrics(steps, _lines(folder / "metrics.jsonl"), _lines(folder / "samples.jsonl"))
    for step in steps.values():
        if is_run_id(step.made_by) and step.state != "ran" and not step.curves:
            there = dict.fromkeys(keys_of(store, step.made_by, step.cache_key) or [step.key], step)
            _apply_metrics(there, *(read_events(store, step.made_by, name) for name in ("metrics", "samples")))
    artifacts: dict[str, Artifact] = {}
    for ref in (ref for step in steps.values() for ref in step.outputs.values()):
        with suppress(UnknownNameError, ArtifactError):  # a report outlives its artifacts; the page says "gone"
            artifacts[ref] = store.find(ref)
    finished = [event for event in events if event.get("kind") == "run_finished"]
    return RunReport(
        id=str(info.get("id", folder.name)),
        name=str(info.get("name", "")),
        status=str(info.get("status", "")),
        created=float(info.get("created", 0.0)),
        seconds=float(finished[-1]["seconds"]) if finished else float(info.get("updated", 0) - info.get("created", 0)),
        attempts=int(info.get("attempts", 1)),
        request=info.get("request") or {},
        error=info.get("error"),
        goals=list(plan.get("goals", [])),
        steps=list(steps.values()),
        config=(folder / "config.yaml").read_text(encoding="utf-8") if (folder / "config.yaml").is_file() else "",
        traceback=str(finished[-1].get("traceback", "")) if finished else "",
        artifacts=artifacts,
    )


def _apply_events(steps: Mapping[str, StepReport], events: list[dict[str, Any]]) -> None:
    for event in events:
        kind, step = event.get("kind"), steps.get(event.get("step", ""))
        if kind == "run_started":
            # A resumed run is judged by its last attempt.
            for each in steps.values():
                each.hints.clear()
                each.signals.clear()
                each.error, each.traceback = None, ""
        elif step is None:
            continue
        elif kind == "summary":
            step.summary.update(event["values"])
        elif kind == "step_cached":
            step.summary.update(event.get("summary") or {})
            step.made_by = event.get("made_by", "")
        elif kind == "signal":
            step.signals[event["name"]] = event["numbers"]
        elif kind == "hint":
            step.hints.append(event)
        elif kind == "step_failed":
            step.error, step.traceback = event["error"], str(event.get("traceback", ""))


def _apply_metrics(
    steps: Mapping[str, StepReport], metrics: list[dict[str, Any]], sampled: list[dict[str, Any]]
) -> None:
    """Take over what a run recorded of steps, by the keys that they had there."""
    curves: dict[tuple[str, str], dict[float, float]] = {}
    for record in metrics:
        key = record.get("step", "")
        for name, value in record["values"].items() if key in steps else ():
            if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
                continue
            if not name.startswith(_TIMING):
                # A resumed run reports some training steps twice: the later report counts.
                curves.setdefault((key, name), {})[float(record["index"])] = float(value)
            elif name != _WHOLE_STEP:
                phase, phases = name.removeprefix(_TIMING).removesuffix("_s"), steps[key].phases
                phases[phase] = phases.get(phase, 0.0) + value
    for (key, name), points in curves.items():
        steps[key].curves[name] = sorted(points.items())
    samples: dict[tuple[Any, ...], dict[str, Any]] = {}
    for number, record in enumerate(sampled):
        sample = record["sample"]
        samples[record.get("step", ""), sample.get("step"), sample.get("which", number)] = sample  # twice, as above
    for (key, *_), sample in samples.items():
        if key in steps:
            steps[key].samples.append(sample)


def _json(path: Path) -> dict[str, Any]:
    return next(iter(_lines(path, whole=True)), {})


def _lines(path: Path, *, whole: bool = False) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    data = path.read_bytes()
    return parse_lines([data] if whole else data.split(b"\n"))
