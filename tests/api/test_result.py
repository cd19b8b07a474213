from __future__ import annotations

from pathlib import Path

import pytest

from nemotron_steps.api.result import Result
from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.runs.run_folder import RunInfo
from tests.runs.report_samples import run_report


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
