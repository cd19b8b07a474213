"""Runs that have been: their age, what is advised, and who may cancel what."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.runs import launch
from nemotron_steps.runs.locks import hold
from nemotron_steps.runs.run_folder import RunFolder, RunInfo
from tests.cli.conftest import Cli


def recorded(workplace: Path, run: str = "r1", **fields: Any) -> RunFolder:
    folder = RunFolder(ArtifactStore(workplace / "home"), run)
    folder.update(folder.create("toy/train", {}), **fields)
    return folder


@pytest.mark.parametrize(
    ("fields", "advised"),
    [
        ({"status": "done"}, ["steps report r1"]),
        ({"status": "running"}, ["steps watch r1", "steps logs r1 -f", "steps cancel r1"]),
        ({"status": "interrupted"}, ["steps run --resume r1", "steps logs r1"]),
        # What was wrong with the request is still wrong; where steps ran, there is something to go on from.
        ({"status": "failed", "error": {"code": "E200", "what": "x"}}, ["steps logs r1"]),
        (
            {"status": "failed", "error": {"code": "E200", "what": "x"}, "steps": {"toy/make": {"state": "ran"}}},
            ["steps run --resume r1", "steps logs r1"],
        ),
        ({"status": "failed", "error": {"code": "E600", "what": "x"}}, ["steps run --resume r1", "steps logs r1"]),
    ],
)
def test_the_advice_fits_how_a_run_stands(cli: Cli, workplace: Path, fields: dict, advised: list[str]) -> None:
    with hold(recorded(workplace, **fields).lock, {}, lambda holder: None):
        lines = [line.strip() for line in cli("status", "r1").out.splitlines()]
    assert [line for line in lines if line.startswith("steps ")] == advised


@pytest.mark.parametrize(
    ("host", "pid", "refusal"),
    [("elsewhere", 1234, "another machine"), (None, 0, "no process"), (None, 1, "no process")],
)
def test_only_a_process_of_this_machine_is_cancelled(
    cli: Cli, workplace: Path, monkeypatch: pytest.MonkeyPatch, host: str | None, pid: int, refusal: str
) -> None:
    folder = recorded(workplace, status="running", host=host or socket.gethostname(), pid=pid)
    killed: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(pid))
    with hold(folder.lock, {}, lambda holder: None):
        cancelled = cli("cancel", "r1")
    assert cancelled.code == 2 and refusal in cancelled.err
    assert killed == []


def test_a_cancelled_run_that_goes_on_all_the_same_is_reported(
    cli: Cli, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nemotron_steps.cli.history._CANCEL_SECONDS", 0.0)
    folder = recorded(workplace, status="running", host=socket.gethostname(), pid=4321)
    killed: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(pid))
    with hold(folder.lock, {}, lambda holder: None):
        cancelled = cli("cancel", "r1")
    assert killed == [4321] and "still runs" in cancelled.err


def test_a_step_at_work_is_shown_with_its_latest_numbers_and_one_that_is_done_with_what_it_made(
    cli: Cli, workplace: Path
) -> None:
    made = {"state": "ran", "outputs": {"rows": "toy/make/rows:v1"}, "seconds": 2.0}
    folder = recorded(workplace, status="running", steps={"toy/make": made, "toy/train": {"state": "running"}})
    records = [
        {"kind": "metrics", "time": 1.0, "step": "toy/train", "index": index, "values": {"loss": 1 / index}}
        for index in (1, 2)
    ]
    (folder.path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    with hold(folder.lock, {}, lambda holder: None):
        lines = [" ".join(line.split()) for line in cli("status", "r1").out.splitlines()]
    assert lines[1:3] == ["toy/make ran 2.0 s toy/make/rows:v1", "toy/train running step 2 loss 0.5"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"status": "submitted"}, "open job job-7 was asked to stop"),
        ({"status": "running", "host": "elsewhere"}, "open job job-7 was asked to stop"),
        ({"status": "running", "host": socket.gethostname()}, "stopped r1"),  # it is waited for
    ],
)
def test_a_job_is_cancelled_by_its_executor(
    cli: Cli, workplace: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], said: str
) -> None:
    folder = recorded(workplace, executor="open", job="job-7", **fields)
    asked: list[str] = []

    def cancel(store: ArtifactStore, info: RunInfo) -> None:
        asked.append(info.id)
        folder.update(info, status="interrupted")

    monkeypatch.setattr(launch, "cancel", cancel)
    monkeypatch.setattr(os, "kill", lambda pid, number: pytest.fail("a process of this machine was signalled"))
    with hold(folder.lock, {}, lambda holder: None):
        cancelled = cli("cancel", "r1")
    assert cancelled.code == 0 and asked == ["r1"]
    assert said in cancelled.out and "steps run --resume r1" in cancelled.out


def test_a_report_of_several_runs_goes_by_the_first(cli: Cli, workplace: Path) -> None:
    runs = [cli("run", "toy/make", f"count={count}", "--json").json["run"] for count in (1, 2)]
    both = cli("report", *reversed(runs), "--json").json
    alone = cli("report", runs[0], "--json").json
    assert (both["run"], alone["run"]) == (runs[1], runs[0]) and both["report"] != alone["report"]
    assert all(run in Path(both["report"]).read_text() for run in runs)


def test_a_run_of_a_home_elsewhere_is_reported_on_a_machine_that_has_nothing_of_it(cli: Cli, tmp_path: Path) -> None:
    home = ("--home", f"memory://{tmp_path.name}-cli")
    run = cli("run", "toy/train", "-c", "tiny", *home, "--json").json["run"]
    backend = ArtifactStore(home[1]).backend
    sample = {"kind": "sample", "time": 1.0, "step": "toy/train", "sample": {"step": 1, "response": "xyzzy"}}
    backend.write(f"runs/{run}/samples.jsonl", json.dumps(sample).encode() + b"\n")
    shutil.rmtree(backend.scratch / "runs")
    page = Path(cli("report", *home, "--json").json["report"]).read_text()
    assert all(text in page for text in ("xyzzy", "reward/mean", "seconds_per_step", "toy/make", "reward_saturated"))
    shutil.rmtree(backend.scratch / "runs")
    kinds = {json.loads(line)["kind"] for line in cli("logs", "--json", *home).out.splitlines()}
    assert {"run_started", "metrics"} <= kinds
