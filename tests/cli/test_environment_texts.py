"""What `steps env verify` comes to, and whom `steps env` asks to judge."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest

from nemotron_steps.cli.environment_commands import _judges, _print_verified
from nemotron_steps.cli.terminal import Terminal
from nemotron_steps.environments.base import GradeResult
from nemotron_steps.environments.recorded import Regraded


def lines_of(show: Any, *given: Any) -> list[str]:
    text = io.StringIO()
    show(*given, Terminal(text, color=False, width=None))
    return [" ".join(line.split()) for line in text.getvalue().splitlines()]


def graded(recorded: float | None, reward: float | None) -> Regraded:
    return Regraded("r.jsonl:1", recorded, GradeResult(reward, failure="no_judge" if reward is None else None))


def test_means_are_of_the_rollouts_that_have_both_rewards() -> None:
    found = [graded(1.0, 0.5), graded(0.0, 0.0), graded(None, 1.0), graded(0.25, None)]
    different = [each for each in found if not each.agrees(0)]
    assert lines_of(_print_verified, found, different) == [
        "✗ r.jsonl:1 recorded 1, here 0.5",
        "✗ r.jsonl:1 recorded none, here 1",
        "✗ r.jsonl:1 recorded 0.25, here not judged (no_judge)",
        *("rollouts 4", "same reward 1 of 4", "not judged here 1", "mean reward recorded 0.5, here 0.25"),
    ]
    assert lines_of(_print_verified, [graded(None, 1.0)], []) == ["rollouts 1", "same reward 1 of 1"]


@pytest.fixture
def asked_models(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None]]:
    """Which endpoints were asked for their models; judges are what they were made of."""
    asked: list[tuple[str, str | None]] = []
    module = "nemotron_steps.environments.judged.judges"
    monkeypatch.setattr(f"{module}.served_model", lambda url, key: asked.append((url, key)) or "listed")
    monkeypatch.setattr(f"{module}.HttpJudge", lambda url, model, *, api_key_env: (url, model, api_key_env))
    return asked


def judges_of(*words: str, model: str | None = None, key: str | None = None) -> dict[str, Any]:
    return _judges(SimpleNamespace(judge=list(words), judge_model=model, judge_key=key))


def test_an_endpoint_plays_every_role_that_no_other_was_named_for(asked_models: list[Any]) -> None:
    found: Any = judges_of("http://a/v1?x=y", "judge_model=http://b/v1", key="KEY")
    assert {role: judge[0] for role, judge in found.items()} == {
        "genrm_model": "http://a/v1?x=y",
        "judge_model": "http://b/v1",
        "safety_model": "http://a/v1?x=y",
    }
    assert asked_models == [("http://a/v1?x=y", "KEY"), ("http://b/v1", "KEY")]
    assert found["judge_model"][1:] == ("listed", "KEY") and found["genrm_model"] is found["safety_model"]
    assert judges_of() == {}


def test_a_model_that_is_named_is_not_asked_for(asked_models: list[Any]) -> None:
    assert judges_of("judge_model=http://b/v1", model="mine") == {"judge_model": ("http://b/v1", "mine", None)}
    assert asked_models == []
