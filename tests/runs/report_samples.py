"""Runs as the report reads them, without a folder."""

from __future__ import annotations

from typing import Any

from nemotron_steps.runs.report.data import RunReport, StepReport


def run_report(*steps: StepReport, **changes: Any) -> RunReport:
    """A run of these steps, the last of which was asked for."""
    fields: dict[str, Any] = {
        "id": "20260102-030405-toy-0a1b",
        "name": "toy",
        "status": "done",
        "created": 0.0,
        "seconds": 12.0,
        "attempts": 1,
        "request": {},
        "error": None,
        "goals": [step.key for step in steps[-1:]],
        "steps": list(steps),
        "config": "",
        "traceback": "",
        "artifacts": {},
    }
    return RunReport(**{**fields, **changes})
