"""The instances of a fan-out in a run that failed: which of them were made, and what those came to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nemotron_steps.cli.summary import show_spreads
from nemotron_steps.cli.terminal import Terminal, duration, printable
from nemotron_steps.runs.spread import Outcome, spread_tables

if TYPE_CHECKING:
    from nemotron_steps.resolver.plan import Plan
    from nemotron_steps.runs.tracker import Record

_STATES = {"step_started": "interrupted", "step_cached": "cached", "step_finished": "ran", "step_failed": "failed"}
"""Kind of record → what a step is called whose last one it is, once the run is over."""
_COLOURS = {"ran": "green", "cached": "green", "failed": "red", "interrupted": "yellow"}


class InstancesSeen:
    """Remembers what the steps of a plan reported; a listener of its run."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._last: dict[str, Record] = {}
        self._summaries: dict[str, dict[str, Any]] = {}

    def __call__(self, record: Record) -> None:
        """See Listener."""
        key = record.get("step")
        if not isinstance(key, str):
            return
        if record["kind"] in _STATES:
            self._last[key] = record
        self._summaries.setdefault(key, {}).update(_summary(record))

    def show(self, terminal: Terminal) -> None:
        """Print every instance, and mean and spread of those that were made. Nothing without a fan-out."""
        fanned = [step for step in self._plan.steps if step.instance is not None]
        if not fanned or not self._last:
            return
        rows = []
        for step in fanned:
            record = self._last.get(step.key)
            state = _STATES[record["kind"]] if record else "not begun"
            rows.append([step.key, terminal.style(state, _COLOURS.get(state, "dim")), _said(record or {})])
        terminal.print()
        terminal.print(f"  {terminal.style('instances', 'bold')}")
        terminal.table(rows, indent=4)
        made = [
            step for step in fanned if _STATES.get(self._last.get(step.key, {}).get("kind", "")) in ("ran", "cached")
        ]
        outcomes = [
            Outcome(step.key, self._summaries.get(step.key, {}), step.instance.stage, step.instance.labels)
            for step in made
            if step.instance is not None
        ]
        show_spreads(spread_tables(outcomes), terminal)


def _summary(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a record says of a step's summary."""
    if record["kind"] == "summary":
        return record["values"]  # type: ignore[no-any-return]
    return (record.get("summary") or {}) if record["kind"] == "step_cached" else {}


def _said(record: Mapping[str, Any]) -> str:
    if record.get("kind") == "step_failed":
        return printable(str(record["error"]["what"]).splitlines()[0])
    return duration(record["seconds"]) if record.get("kind") == "step_finished" else ""
