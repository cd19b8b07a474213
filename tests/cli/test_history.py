"""Runs that have been: their age, what is advised, and who may cancel what."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.runs.locks import hold
from nemotron_steps.runs.run_folder import RunFolder
from tests.cli.conftest import Cli


def recorded(workplace: Path, run: str = "r1", **fields: Any) -> RunFolder:
    folder = RunFolder(ArtifactStore(workplace / "home"), run)
    folder.update(folder.create("toy/train", {}), **fields)
    return folder


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(50, "just now"), (61, "1 min ago"), (59 * 60, "59 min ago"), (3601, "1 h ago"), (86401, "1 d ago")],
)
def test_the_age_of_a_run_is_told_in_its_largest_unit(
    cli: Cli, workplace: Path, monkeypatch: pytest.MonkeyPatch, seconds: int, shown: str
) -> None:
    recorded(workplace, status="done")
    (made,) = [run["created"] for run in cli("runs", "--json").json]
    monkeypatch.setattr(time, "time", lambda: made + seconds)
    assert shown in cli("runs").out


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
