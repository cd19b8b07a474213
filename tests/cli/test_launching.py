"""Profiles and executors from the command line: what is refused, when, and what a refusal leaves behind."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from nemotron_steps.errors import RequestError
from nemotron_steps.runs.executors import base
from tests.cli.conftest import Cli


class ClosedQueue:
    def submit(self, launch: base.Launch) -> str:
        raise RequestError("the queue is closed")

    def status(self, job: str) -> base.JobStatus:
        return base.JobStatus(base.JobState.LOST)

    def cancel(self, job: str) -> None:
        return None


@pytest.fixture
def closed_queue(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("closed", f"{__name__}:ClosedQueue", base.ENTRY_POINT_GROUP)
    monkeypatch.setattr(base, "entry_points", lambda group: [point] if group == base.ENTRY_POINT_GROUP else [])
    (workplace / "env.toml").write_text('[there]\nexecutor = "closed"\n')


def test_a_refused_submission_is_a_failed_run_that_nothing_waits_for(cli: Cli, closed_queue: None) -> None:
    refused = cli("run", "toy/train", "-c", "tiny", "-b", "there")
    assert refused.code == 2 and "the queue is closed" in refused.err
    (run,) = cli("runs", "--json").json
    assert (run["status"], run["error"]["what"]) == ("failed", "the queue is closed")
    followed = cli("logs", "latest", "-f")
    assert followed.code == 2 and "the queue is closed" in followed.err
    cancelled = cli("cancel", "latest")
    assert cancelled.code == 2 and "is not running" in cancelled.err
    shown = cli("status", "latest")
    assert shown.code == 0 and "the queue is closed" in shown.err + shown.out


def test_a_bad_profile_is_told_with_every_other_mistake(cli: Cli, workplace: Path) -> None:
    (workplace / "env.toml").write_text('[far]\nexecutor = "nowhere"\nnodes = 1\n')
    for command in (("run", "-d"), ("run",), ("plan",)):
        found = cli(*command, "toy/train", "-c", "tiny", "stpes=1", "--input", "dta=x", "-r", "far", "--json")
        assert found.code == 2
        whats = [problem["what"] for problem in found.json["error"]["problems"]]
        assert [text for text in whats if "no executor 'nowhere'" in text], whats
        assert [text for text in whats if "'stpes'" in text], whats
        assert [text for text in whats if "input 'dta'" in text], whats


def test_an_unknown_profile_is_told_with_a_wrong_pipeline_override(cli: Cli) -> None:
    found = cli("plan", "toy_all", "steps=1", "-r", "nowhere", "--json")
    whats = [problem["what"] for problem in found.json["error"]["problems"]]
    assert whats == ["no profile 'nowhere'", "an override of a pipeline names its stage"]
