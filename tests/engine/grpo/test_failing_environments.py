"""Environments that break while a run trains, in both loops: counted, masked, reported, tried again, dropped."""

import math

import pytest

from nemotron_steps.engine.grpo.buffer import MAX_FAILURES
from nemotron_steps.engine.rollouts.data import read_rows
from nemotron_steps.environments import registry
from tests.engine.grpo.grpo_environments import Vowels
from tests.engine.grpo.grpo_runs import config_of, events_of, marked, metrics_of, run_loop, start

LOOPS = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


class Brittle(Vowels):
    """Raises on rows that say so; `alike` on some of a group's rollouts alone."""

    name = "brittle"

    async def verify(self, row, response, session):
        if row.get("bad") == "all" or (row.get("bad") == "some" and sum(response.text.encode()) % 2):
            raise KeyError("answer")
        if row.get("bad") == "number":
            return 1.0
        return await super().verify(row, response, session)


@pytest.fixture(autouse=True)
def brittle(monkeypatch):
    monkeypatch.setitem(registry.BUILT_IN, "brittle", f"{__name__}:Brittle")


def brittle_run(task, work, asynchronous, bad, records, *, steps=3, **changes):
    """A run whose row i is bad as `bad[i]` says."""
    rows = read_rows(task / "train.jsonl")[:16]
    config = config_of(task, steps, environment="brittle", grpo__async_grpo__enabled=asynchronous, **changes)
    return start(config, work, records, marked(rows, bad=[bad.get(i) for i in range(16)]))


@LOOPS
def test_a_bad_row_is_tried_again_then_dropped_and_the_run_goes_on(asynchronous, task, tmp_path):
    records = []
    run = brittle_run(task, tmp_path, asynchronous, {5: "all"}, records, data__shuffle=False)
    assert run_loop(run)["steps"] == 3
    (dropped,) = events_of(records, "prompt_dropped")
    assert dropped["where"] == run.prompts.at(5).where and dropped["failures"] == MAX_FAILURES
    failed = events_of(records, "rollout_failed")
    assert [(e["environment"], e["failure"], e["where"]) for e in failed] == [
        ("brittle", "verify_failed", dropped["where"])
    ] * MAX_FAILURES
    assert "raise KeyError" in failed[0]["traceback"] and failed[0]["rollouts"] == 8
    metrics = metrics_of(records)
    assert len(metrics) == 3 and all(math.isfinite(m["loss"]) for m in metrics)
    shares = [m.get("failures/brittle/verify_failed", 0.0) for m in metrics]
    assert 0 < max(shares) <= MAX_FAILURES / 4 and (asynchronous or shares[0] == shares[2] == 0)


@LOOPS
def test_answers_that_a_grader_fails_over_earn_nothing_and_are_counted(asynchronous, task, tmp_path):
    records = []
    bad = dict.fromkeys(range(0, 16, 2), "some")
    run = brittle_run(task, tmp_path, asynchronous, bad, records)
    assert run_loop(run)["steps"] == 3
    metrics = metrics_of(records)
    assert 0 < max(m.get("reward/brittle/grader_failed", 0) for m in metrics) < 1
    assert not any(m.get("failures/verify_failed") for m in metrics)
    assert all(math.isfinite(m["loss"]) and math.isfinite(m["reward/mean"]) for m in metrics)
