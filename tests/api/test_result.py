from __future__ import annotations

from pathlib import Path

import pytest

from nemotron_steps.api.result import Result
from nemotron_steps.artifacts.models import Artifact
from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.runs.report.data import StepReport
from nemotron_steps.runs.run_folder import RunInfo
from tests.runs.report_samples import run_report


def test_a_result_speaks_of_the_last_step_request_for(tmp_path: Path) -> None:
    made = {name: Artifact("t", "d", tmp_path, name=name, version=1) for name in ("rows", "model")}
    steps = [
        StepReport("make", {}, state="ran", outputs={"rows": "rows:v1"}, summary={"rows": 1}),
        StepReport("train", {}, outputs={"model": "model:v1", "lost": "lost:v1"}, curves={"loss": [(1.0, 0.5)]}),
        StepReport("other", {}, summary={"x": 1}),
    ]
    result = Result(ArtifactStore(tmp_path), "run-1")
    artifacts = {artifact.ref: artifact for artifact in made.values()}
    result._read = run_report(*steps, goals=["make", "train"], artifacts=artifacts)
    assert (result.outputs, result.summary, result.metrics) == ({"model": made["model"]}, {}, {"loss": {1: 0.5}})
    assert list(result.steps) == ["make", "train", "other"] and result.steps["make"].summary == {"rows": 1}
    assert list(result.plot("loss", step="train").series) == ["loss"]


def test_a_run_is_read_anew_while_it_works_and_kept_once_it_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, reads = "running", []
    monkeypatch.setattr("nemotron_steps.api.result.get_run", lambda *_: RunInfo("run-1", status=status))
    monkeypatch.setattr("nemotron_steps.api.result.run_file", lambda *_: None)
    monkeypatch.setattr(
        "nemotron_steps.api.result.read_report", lambda *_: reads.append(1) or run_report(attempts=len(reads))
    )
    result = Result(ArtifactStore(tmp_path), "run-1")
    assert [result._report.attempts for _ in range(2)] == [1, 2]
    status = "done"
    assert [result._report.attempts for _ in range(2)] == [3, 3]
