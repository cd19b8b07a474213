"""Numbers that a check is held against: those of the summary first, then the last of the step's metrics."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.manifest.pipeline_models import StageCheck
from nemotron_steps.resolver.plan import PlannedStep
from nemotron_steps.runs.hints import blocked, failed_checks, flat_numbers
from nemotron_steps.runs.run_folder import RunFolder
from tests.runs.runner_toy_plan import make_plan


@pytest.fixture
def made(store: ArtifactStore) -> ArtifactStore:
    """Run r1, in which `a` worked under key k and `b` under another."""
    folder = RunFolder(store, "r1")
    steps = {"a": {"state": "ran", "cache_key": "k"}, "b": {"state": "ran", "cache_key": "other"}}
    folder.update(folder.create("toy", {}), status="done", steps=steps)
    values = [("a", {"kl": 9.0, "loss": 1.0}), ("b", {"kl": 5.0, "only_b": 1.0}), ("a", {"kl": 2.0})]
    lines = [json.dumps({"kind": "metrics", "step": step, "values": each}) + "\n" for step, each in values]
    (folder.path / "metrics.jsonl").write_text("".join(lines))
    return store


def found(store: ArtifactStore, summary: dict[str, Any], *metrics: str, run: str = "r1") -> dict[str, str]:
    checks = [StageCheck(metric=metric, at_most=-1.0) for metric in metrics]
    return {each.check.metric: each.found for each in failed_checks(checks, summary, store, run, "k")}


def test_a_summarys_number_comes_before_a_metric_of_that_name(made: ArtifactStore) -> None:
    assert found(made, {"kl": 4.0}, "kl", "loss") == {"kl": "4", "loss": "1"}
    assert found(made, {}, "kl") == {"kl": "2"}


def test_metrics_of_another_step_or_of_a_run_that_is_gone_are_no_numbers_of_this_one(made: ArtifactStore) -> None:
    assert found(made, {}, "only_b")["only_b"].startswith("no such number")
    assert found(made, {"rows": 3}, "rows", "kl", run="gone") == {"rows": "3", "kl": "no such number"}


def test_numbers_of_a_summary_are_named_by_their_way() -> None:
    table = {"a": {"x": 1, "y": "nan"}, "change": {"before": 1, "after": 2, "better": "higher"}, "after": {"after": 5}}
    numbers = flat_numbers({**table, "text": "many", "flag": True, "empty": {}, "none": 0})
    assert str(numbers) == str(
        {
            "a/x": 1.0,
            "a/y": float("nan"),
            "change": 2.0,
            "change/before": 1.0,
            "change/after": 2.0,
            "after/after": 5.0,
            "none": 0.0,
        }
    )


def test_every_check_that_blocks_is_in_the_error(made: ArtifactStore) -> None:
    step: PlannedStep = make_plan().steps[1]
    checks = [StageCheck(metric="kl", at_most=1.0), StageCheck(metric="loss", at_least=2.0)]
    failed = failed_checks(checks, {}, made, "r1", "k")
    error = blocked(failed, step, "r7")
    assert error.what == "'toy/train' does not pass its checks; its results are kept"
    assert (error.where, error.expected) == ("stage toy/train: kl, loss", "at most 1.0; at least 2.0")
    assert error.found == "2; 1" and error.hints[0].startswith("steps run --resume r7 --ignore-checks toy/train ")
