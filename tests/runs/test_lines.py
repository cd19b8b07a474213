"""Records as lines of the log."""

from __future__ import annotations

from typing import Any

import pytest

from nemotron_steps.runs.lines import render, signal_text


def line(kind: str, step: str = "toy", **fields: Any) -> str | None:
    return render({"kind": kind, "step": step, **fields})


@pytest.mark.parametrize(
    ("kind", "fields", "text"),
    [
        ("run_started", {"run": "r1", "resumed": False, "name": "n", "steps": ["a"]}, "run r1 started: n, 1 step"),
        ("run_started", {"run": "r1", "resumed": True, "name": "n", "steps": "ab"}, "run r1 resumed: n, 2 steps"),
        ("run_finished", {"ran": 0, "cached": 1, "status": "done", "seconds": 0.1}, "the step is cached (0.1 s)"),
        ("run_finished", {"ran": 0, "cached": 2, "status": "done", "seconds": 0.1}, "all 2 steps are cached (0.1 s)"),
        (
            "run_finished",
            {"ran": 0, "cached": 1, "status": "failed", "seconds": 61},
            "run failed in 1 min 01 s: 0 steps",
        ),
        (
            "run_finished",
            {"ran": 1, "cached": 2, "status": "done", "seconds": 1},
            "run done in 1.0 s: 1 step ran, 2 cached",
        ),
    ],
)
def test_how_a_run_begins_and_ends(kind: str, fields: dict[str, Any], text: str) -> None:
    said = line(kind, "", **fields)
    assert said is not None and text in said and not said.startswith("[")


@pytest.mark.parametrize(
    ("kind", "fields", "text"),
    [
        ("step_started", {"resumed": False, "cache_key": "0123456789abcdef"}, "started (key 0123456789ab)"),
        ("step_started", {"resumed": True, "cache_key": "01"}, "continues from its work folder (key 01)"),
        ("step_cached", {"reason": "cached", "outputs": {"a": "x:v1", "b": "y:v2"}}, "cached: a = x:v1, b = y:v2"),
        ("step_failed", {"error": {"what": "no disk"}}, "failed: no disk"),
        (
            "step_waiting",
            {"holder": {"run": "r2", "pid": 7, "host": "h"}},
            "another run works on the same artifact (run r2, process 7 on h): waiting for it",
        ),
        ("metrics", {"index": 3, "values": {"a": 1, "b": 0.123456}}, "step 3: a=1  b=0.1235"),
        (
            "metrics",
            {"index": 3, "values": dict.fromkeys("abcdefgh", 1)},
            "step 3: a=1  b=1  c=1  d=1  e=1  f=1  (+2 more)",
        ),
        ("event", {"name": "resumed", "fields": {}}, "resumed"),
        (
            "summary",
            {
                "values": {
                    "reward": {"before": 0.25, "after": 0.75},
                    "verdict": {"before": None, "after": 1},
                    "steps": 3,
                }
            },
            "reward: 0.25 → 0.75 (+0.5)  verdict: None → 1  steps: 3",
        ),
    ],
)
def test_what_a_step_does(kind: str, fields: dict[str, Any], text: str) -> None:
    assert line(kind, **fields) == f"[toy] {text}"


def test_a_signal_says_its_numbers_and_how_often() -> None:
    assert signal_text("kl_spike", {"kl": 2.0, "limit": 0.5}) == "kl_spike (kl=2, limit=0.5)"
    assert signal_text("kl_spike", {"kl": 2.0}, times=3) == "kl_spike (kl=2, 3 times)"
    assert (
        signal_text("kl_spike", {"message": "KL is 2", "step": 6}, times=2) == "kl_spike at step 6: KL is 2 (2 times)"
    )
    assert signal_text("kl_spike", {}) == "kl_spike"
