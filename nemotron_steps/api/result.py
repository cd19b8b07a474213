"""A run, read from its folder: while it works, when it is done, and long afterwards."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from nemotron_steps.api.artifacts import Artifacts
from nemotron_steps.api.charts import Plot, charts, result_html
from nemotron_steps.artifacts.models import Artifact
from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.runs.report_data import RunReport, StepReport, read_report
from nemotron_steps.runs.run_folder import get_run, run_file

Series = dict[int, float]
"""Training step → number."""


@dataclass(frozen=True)
class StepRun:
    """One step of a run.

    Attributes:
        state: ran, cached, reused, failed, interrupted, running or pending.
        seconds: what it took when it was made.
        outputs: port → artifact, those of them that are still there.
        summary: what it reported at its end.
        metrics: name → training step → number.
        hints: what to change, where it raised signals.
        samples: examples of what the policy answered.
    """

    key: str
    state: str
    seconds: float | None
    outputs: Mapping[str, Artifact]
    summary: Mapping[str, Any]
    metrics: Mapping[str, Series]
    hints: Sequence[Mapping[str, Any]]
    samples: Sequence[Mapping[str, Any]]


class Result:
    """A run of a home. Everything is read from its folder when it is first asked for.

    Attributes:
        id: as `steps runs` shows it.
    """

    def __init__(self, store: ArtifactStore, run_id: str) -> None:
        self.id = run_id
        self._store = store

    @cached_property
    def _report(self) -> RunReport:
        for name in ("run.json", "plan.json", "config.yaml", "events.jsonl", "metrics.jsonl", "samples.jsonl"):
            self._fetch(name)
        return read_report(self.folder, self._store)

    def _fetch(self, name: str) -> None:
        """Have a file of a run on another machine here; one that ended early has not written all of them."""
        from nemotron_steps.errors import UnknownNameError

        try:
            run_file(self._store, self.id, name)
        except UnknownNameError:
            return

    @property
    def status(self) -> str:
        """done, failed, interrupted, running, submitted or killed."""
        return get_run(self._store, self.id).status

    @property
    def folder(self) -> Path:
        """The run's folder on this machine."""
        return self._store.backend.local(f"runs/{self.id}")

    @property
    def report(self) -> Path:
        """The page about it, to be opened in a browser. UnknownNameError while there is none."""
        return run_file(self._store, self.id, "report.html")

    @property
    def error(self) -> dict[str, Any] | None:
        """What it ended with, as StepsError.to_dict; None for a run that did not fail."""
        return self._report.error

    @cached_property
    def steps(self) -> dict[str, StepRun]:
        """Every step by its key, in the plan's order."""
        return {step.key: self._step(step) for step in self._report.steps}

    @property
    def outputs(self) -> dict[str, Artifact]:
        """Port → artifact of the last step asked for."""
        return dict(self._goal.outputs)

    @property
    def summary(self) -> dict[str, Any]:
        """What the last step asked for reported at its end."""
        return dict(self._goal.summary)

    @property
    def metrics(self) -> dict[str, Series]:
        """Name → training step → number, of the last step asked for; `pandas.DataFrame(result.metrics)` is a table."""
        return dict(self._goal.metrics)

    @property
    def artifacts(self) -> Artifacts:
        """The home that it is in."""
        return Artifacts.of(self._store)

    def plot(self, *names: str, step: str | None = None) -> Plot:
        """Curves of metrics; a notebook draws them.

        Args:
            names: which; none: reward, loss and what else tells how the training goes.
            step: of which step; None: the last one asked for.

        Raises UnknownNameError for a metric that was not reported.
        """
        found = self._goal if step is None else self.steps[step]
        return charts(found.metrics, names, found.key)

    @property
    def _goal(self) -> StepRun:
        return self.steps[self._report.goals[-1]]

    def _step(self, step: StepReport) -> StepRun:
        return StepRun(
            step.key,
            step.state,
            step.seconds,
            {port: self._report.artifacts[ref] for port, ref in step.outputs.items() if ref in self._report.artifacts},
            step.summary,
            {name: {int(index): value for index, value in points} for name, points in step.curves.items()},
            step.hints,
            step.samples,
        )

    def __repr__(self) -> str:
        return f"<Result {self.id}: {self.status}>"

    def _repr_html_(self) -> str:
        return result_html(self)


def open_run(run: str = "latest", *, home: str | os.PathLike[str] | None = None) -> Result:
    """A run that is there already.

    Args:
        run: its id, a part of it that no other has, or `latest`.
        home: a folder or an fsspec URL; None for STEPS_HOME, or `.steps`.

    Raises UnknownNameError with near ids.
    """
    store = ArtifactStore(None if home is None else os.fspath(home))
    return Result(store, get_run(store, run).id)
