"""A tracker for MLflow: one MLflow run per executed step, its config, metrics, summary, signals and samples.

The run folder stays the record; MLflow gets a copy of what a listener sees, redacted like everything else. Tags say
which run and step it is, what it read (`input.PORT`) and what it made (`output.PORT`).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import StrictStr

from nemotron_steps.config.profiles import Table
from nemotron_steps.runs.context import Record
from nemotron_steps.runs.trackers.base import ExperimentTracker, leaves

_PARAMS, _METRICS = 100, 1000
"""Of one request, as MLflow's servers bound it."""
_KEY_CHARACTERS, _VALUE_CHARACTERS = 250, 500
_NOT_IN_A_KEY = re.compile(r"[^\w.\-/ ]", re.ASCII)
_ENVIRONMENT = {
    # Whom a run is mirrored to is the user's choice; MLflow's makers are told nothing.
    "MLFLOW_DISABLE_TELEMETRY": "true",
    # MLflow's own patience (7 tries of 2 minutes) would hold training up; the mirror goes quiet instead.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
}
"""Where the environment does not say otherwise."""


class MlflowSettings(Table):
    """`[mlflow]`: an MLflow run of every executed step."""

    tracking_uri: StrictStr | None = None
    """`http://HOST:5000`, `sqlite:///FILE` or what else MLflow takes. None: what MLFLOW_TRACKING_URI says, or else
    MLflow's own default."""
    experiment: StrictStr = "nemotron-steps"


class MlflowTracker(ExperimentTracker):
    """See ExperimentTracker."""

    target, module, table = "MLflow", "mlflow", "mlflow"
    settings_model = MlflowSettings
    _client: Any = None
    _index = 0

    def __init__(self, *arguments: Any) -> None:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        super().__init__(*arguments)

    def _interrupt(self) -> None:
        self._finish("KILLED")

    def _on_step_started(self, record: Record) -> None:
        planned = self._plan.step(record["step"])
        if self._client is None:
            self._client = self._package.MlflowClient(tracking_uri=self._settings.tracking_uri)
        name = self._settings.experiment
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment is not None else self._client.create_experiment(name)
        tags = {"run": self._folder.id, "step": planned.key, "step_id": planned.step_id}
        made = self._client.create_run(number, run_name=f"{planned.key} {self._folder.id}", tags=tags)
        self._run, self._index = made.info.run_id, 0
        self._samples.clear()
        param = self._package.entities.Param
        config = {_key(name): value for name, value in leaves(self._redact(dict(planned.config)), "", ".")}
        params = [param(name, str(value)[:_VALUE_CHARACTERS]) for name, value in config.items()]
        for part in _parts(params, _PARAMS):
            self._client.log_batch(self._run, params=part)

    def _on_metrics(self, record: Record) -> None:
        self._index = record["index"]
        self._log(record["values"], record["time"])

    def _on_summary(self, record: Record) -> None:
        values = dict(leaves(record["values"], "summary", "/"))
        self._log(values, record["time"])
        for name, value in values.items():
            if isinstance(value, str):
                self._tag(name, value)

    def _on_sample(self, record: Record) -> None:
        self._samples.append(record["sample"])

    def _on_signal(self, record: Record) -> None:
        self._tag(f"signal.{record['name']}", ", ".join(f"{name}={value}" for name, value in record["numbers"].items()))

    def _on_step_finished(self, record: Record) -> None:
        for port, reference in record["outputs"].items():
            self._tag(f"output.{port}", reference)
            for edge in self._store.find(reference).inputs:
                self._tag(f"input.{edge.port}", edge.ref or edge.digest)
        self._finish("FINISHED")

    def _on_step_failed(self, record: Record) -> None:
        self._tag("error", record["error"]["what"])
        self._finish("FAILED")

    def _log(self, values: Mapping[str, Any], seconds: float) -> None:
        metric, at = self._package.entities.Metric, int(1000 * seconds)
        metrics = [
            metric(_key(name), float(value), at, self._index)
            for name, value in values.items()
            if isinstance(value, int | float)
        ]
        for part in _parts(metrics, _METRICS):
            self._client.log_batch(self._run, metrics=part)

    def _tag(self, name: str, value: str) -> None:
        self._client.set_tag(self._run, _key(name), value[:_VALUE_CHARACTERS])

    def _finish(self, status: str) -> None:
        run, self._run = self._run, None
        try:
            if self._samples:
                lines = (json.dumps(sample, ensure_ascii=False) for sample in self._samples)
                self._client.log_text(run, "\n".join(lines) + "\n", "samples.jsonl")
        finally:
            # Samples go to a store of their own; where that one fails the run must not seem to go on.
            self._client.set_terminated(run, status)


def _key(name: str) -> str:
    """A name that every store takes: some make it a path, which must not lead elsewhere than it says."""
    parts = _NOT_IN_A_KEY.sub("_", name)[:_KEY_CHARACTERS].split("/")
    return "/".join("_" if part in (".", "..") else part for part in parts if part) or "_"


def _parts(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))
