"""How a run went, and each of its steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemotron_steps.artifacts.models import Artifact
from nemotron_steps.resolver.plan import Instance
from nemotron_steps.runs.hints import Hint
from nemotron_steps.runs.spread import Outcome, Table, spread_tables


@dataclass(frozen=True)
class StepResult:
    """How one step of a run went.

    `state` is "ran", "cached" (an earlier run made it) or "reused" (another run made it while this one waited).
    """

    key: str
    step_id: str
    state: str
    outputs: Mapping[str, Artifact]
    seconds: float
    summary: Mapping[str, Any] = field(default_factory=dict)
    hints: tuple[Hint, ...] = ()
    instance: Instance | None = None
    made_by: str = ""
    """The run that made it, and the key of the cache that it made it under."""
    cache_key: str = ""


@dataclass(frozen=True)
class RunResult:
    """A finished run. `folder` is its run folder on this machine."""

    id: str
    folder: Path
    steps: tuple[StepResult, ...]
    seconds: float

    @property
    def spreads(self) -> dict[str, Table]:
        """What instances of fanned-out stages came to, by title; see `spread`."""
        return spread_tables(
            Outcome(s.key, s.summary, s.instance.stage if s.instance else "", s.instance.labels if s.instance else None)
            for s in self.steps
        )

    @property
    def nothing_ran(self) -> bool:
        """Whether every step was cached."""
        return all(step.state != "ran" for step in self.steps)

    def step(self, key: str) -> StepResult:
        """The result of one step of the plan. KeyError if there is none."""
        for each in self.steps:
            if each.key == key:
                return each
        raise KeyError(key)
