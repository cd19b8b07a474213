"""What a GRPO step puts around its loop, without a model: held-out prompts, left-out ones, and what is closed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemotron_steps.engine.rollouts.evaluation import EvaluationResult
from nemotron_steps.errors import ConfigError, StepFailedError
from nemotron_steps.runs.context import plain_context
from nemotron_steps.steps import grpo


def result(reward: float, tokens: float, cut: float) -> EvaluationResult:
    return EvaluationResult(reward, 0.125, 6, 0, cut, tokens, {}, {})


BEFORE, AFTER = result(0.25, 100.0, 0.5), result(0.75, 80.0, 0.0)


class Environments:
    """Notes what is asked of it; may fail or hang when it is closed."""

    def __init__(self, notes: list[Any], close: BaseException | float | None = None) -> None:
        self._notes, self._close = notes, close

    async def start(self) -> None:
        self._notes.append("start")

    async def close(self) -> None:
        self._notes.append("close")
        if isinstance(self._close, float):
            await asyncio.sleep(self._close)
        elif self._close is not None:
            raise self._close


class Step:
    """The step with everything heavy replaced by notes."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, heldout: Any = ("h",), fails: bool = False):
        self.notes: list[Any] = []
        self.records: list[dict[str, Any]] = []
        self._fails = fails
        policy = SimpleNamespace(weights=lambda: "weights")
        generator = SimpleNamespace(update_weights=lambda *given: self.notes.append(("update", *given)))
        self.built = SimpleNamespace(policy=policy, generator=generator, close=lambda: self.notes.append("run closed"))

        def read_data(config: Any, left_out: Any) -> Any:
            left_out(3)
            return SimpleNamespace(heldout=heldout)

        async def evaluate_heldout(run: Any, rows: Any, when: str) -> EvaluationResult:
            self.notes.append((when, rows))
            return BEFORE if when == "before" else AFTER

        def loop(name: str) -> Any:
            def train(run: Any, runner: Any) -> dict[str, Any]:
                self.notes.append(name)
                if self._fails:
                    raise StepFailedError("lost")
                return {"steps": 2}

            return train

        monkeypatch.setattr(grpo, "read_data", read_data)
        monkeypatch.setattr(grpo, "build_run", lambda *given, **named: (self.built, Environments(self.notes)))
        monkeypatch.setattr(grpo, "evaluate_heldout", evaluate_heldout)
        monkeypatch.setattr(grpo, "train", loop("train"))
        monkeypatch.setattr(grpo, "train_async", loop("train_async"))
        monkeypatch.setattr(
            grpo,
            "save_trained",
            lambda policy, context, checkpoint, port: self.notes.append(("saved", checkpoint, port)),
        )
        config = SimpleNamespace(
            data=SimpleNamespace(max_input_seq_length=9),
            grpo=SimpleNamespace(async_grpo=SimpleNamespace(enabled=False)),
            policy=SimpleNamespace(checkpoint="base"),
        )
        self.context = plain_context(config, tmp_path, listener=self.records.append)

    def run(self) -> dict[str, Any]:
        grpo.run_grpo(self.context)
        (summary,) = [record["values"] for record in self.records if record["kind"] == "summary"]
        return summary


def test_held_out_prompts_are_graded_before_and_after_with_the_weights_of_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Step(tmp_path, monkeypatch)
    both = {name: {"before": each, "after": each} for name, each in (("standard_error", 0.125), ("samples", 6))}
    assert step.run() == {
        "steps": 2,
        "heldout_reward": {"before": 0.25, "after": 0.75, **both},
        "heldout_answer_tokens": {"before": 100.0, "after": 80.0},
        "heldout_truncation_rate": {"before": 0.5, "after": 0.0},
    }
    assert step.notes == [
        *("start", ("update", "weights", 0), ("before", ("h",)), "train", ("after", ("h",)), "close"),
        *(("saved", "base", "policy"), "run closed"),
    ]
    measured = {record["index"]: record["values"] for record in step.records if record["kind"] == "metrics"}
    assert measured == {0: BEFORE.metrics("heldout"), 2: AFTER.metrics("heldout")}
    (left_out,) = [record["fields"] for record in step.records if record["kind"] == "event"]
    assert left_out == {"longer_than": 9, "count": 3}


def test_a_resumed_step_knows_how_its_policy_did_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(tmp_path, monkeypatch)
    kept = result(0.125, 1.0, 0.0)
    (step.context.work / "heldout_before.json").write_text(json.dumps(kept.to_dict()))
    assert step.run()["heldout_reward"]["before"] == 0.125
    (before,) = [each["values"] for each in step.records if each["kind"] == "metrics" and each["index"] == 0]
    assert before == kept.metrics("heldout")
    assert [note for note in step.notes if isinstance(note, tuple)][:2] == [
        ("after", ("h",)),
        ("saved", "base", "policy"),
    ]


def test_without_held_out_prompts_nothing_is_graded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(tmp_path, monkeypatch, heldout=())
    step.context.config.grpo.async_grpo.enabled = True
    assert step.run() == {"steps": 2}
    assert step.notes == ["start", "train_async", "close", ("saved", "base", "policy"), "run closed"]


def test_a_run_that_fails_is_closed_and_nothing_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(tmp_path, monkeypatch, fails=True)
    with pytest.raises(StepFailedError, match="lost"):
        step.run()
    assert step.notes[-3:] == ["train", "close", "run closed"]
    assert json.loads((step.context.work / "heldout_before.json").read_text())["reward"] == 0.25


@pytest.mark.parametrize(("close", "noted"), [(ConfigError("stuck"), "stuck"), (5.0, "TimeoutError"), (None, None)])
def test_what_stopped_a_run_is_told_first_however_its_environments_close(
    close: Any, noted: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpo, "_CLOSE_SECONDS", 0.01)
    notes: list[Any] = []
    with pytest.raises(KeyError) as caught, grpo._started_environments(Environments(notes, close)):  # type: ignore[arg-type]
        raise KeyError("first")
    told = getattr(caught.value, "__notes__", [])
    assert notes == ["start", "close"] and len(told) == (noted is not None)
    assert all("did not close" in note and str(noted) in note for note in told)


def test_environments_that_do_not_close_after_a_run_that_succeeded_are_an_error() -> None:
    notes: list[Any] = []
    environments: Any = Environments(notes, ConfigError("stuck"))
    with pytest.raises(ConfigError, match="stuck"), grpo._started_environments(environments):
        pass
    assert notes == ["start", "close"]
