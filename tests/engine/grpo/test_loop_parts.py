"""Decisions of the loop that need no policy and no generator: when to validate, what to try again, what to say."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemotron_steps.config.schema.grpo import GrpoConfig
from nemotron_steps.engine.grpo import loop
from nemotron_steps.engine.grpo.distillation import METADATA_KEY, Distillation
from nemotron_steps.engine.grpo.loop import run_on
from tests.engine.engine_samples import random_batch, rollout


class Noted:
    """A reporter that keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.samples: list[dict[str, Any]] = []

    def event(self, name: str, **fields: Any) -> None:
        self.events.append((name, fields))

    def sample(self, sample: dict[str, Any]) -> None:
        self.samples.append(sample)


def a_run(step: int, total: int = 6, **grpo: Any) -> Any:
    config = SimpleNamespace(grpo=GrpoConfig.model_validate(grpo))
    return SimpleNamespace(step=step, total_steps=total, config=config, reporter=Noted())


@pytest.mark.parametrize(
    ("grpo", "steps"),
    [
        ({"val_period": 2, "val_at_end": False}, [2, 4, 6]),
        ({"val_period": 2, "val_start_at": 4, "val_at_end": False}, [4, 6]),
        ({"val_period": 4, "val_at_end": False}, [4]),
        ({"val_period": 4, "val_at_end": True}, [4, 6]),
        ({"val_period": -1, "val_at_end": True}, [6]),
        ({"val_period": 0, "val_at_end": False}, []),
    ],
)
def test_validation_comes_every_so_many_steps_from_where_it_begins_and_at_the_end(
    grpo: dict[str, Any], steps: list[int]
) -> None:
    assert [step for step in range(1, 7) if loop.validation_due(a_run(step, **grpo))] == steps


def test_the_kl_to_the_teachers_is_a_mean_over_trained_tokens_of_each_environment() -> None:
    batch, _ = random_batch(rows=4, width=6, seed=2, noise_in_padding=False)
    batch.sample_mask[:] = torch.tensor([1.0, 1.0, 0.0, 1.0])
    batch.generation_logprobs = torch.arange(24.0).view(4, 6)
    rollouts = [
        rollout(index=n, environment=name, metadata={METADATA_KEY: teacher})
        for n, (name, teacher) in enumerate((("maths", "a"), ("code", "b"), ("code", None), ("maths", "a")))
    ]
    asked = []

    class Teachers:
        def score(self, given: Any, names: Any) -> Any:
            asked.append(names)
            given.teacher_logprobs = torch.zeros(4, 6)
            return given

    prepared: Any = SimpleNamespace(batch=batch, rollouts=rollouts, metrics={"kept": 1.0})
    distillation = Distillation(choice=None, teachers=Teachers())  # type: ignore[arg-type]
    distillation.score(prepared)
    assert asked == [["a", "b", None, "a"]]
    mask = batch.token_mask * batch.sample_mask[:, None]
    mask[:, 0] = 0
    nats, tokens = (batch.generation_logprobs * mask).sum(1), mask.sum(1)
    assert prepared.metrics == {
        "kept": 1.0,
        "teacher_kl/code": pytest.approx(float(nats[1] / tokens[1])),
        "teacher_kl/maths": pytest.approx(float((nats[0] + nats[3]) / (tokens[0] + tokens[3]))),
        "teacher_kl/mean": pytest.approx(float(nats.sum() / tokens.sum())),
    }
    assert distillation.own_metrics({"advantages/mean": 1.0, "groups/count": 1.0, "loss": 2.0}) == {"loss": 2.0}


@pytest.mark.parametrize("trained", [True, False])
def test_where_advantages_are_the_teachers_the_divergence_is_what_is_trained_if_anything_is(trained: bool) -> None:
    batch, _ = random_batch(rows=2, width=6, seed=2, noise_in_padding=False)
    batch.sample_mask[:] = float(trained)

    class Teachers:
        def score(self, given: Any, names: Any) -> Any:
            given.teacher_logprobs = given.generation_logprobs - 2.0
            return given

    prepared: Any = SimpleNamespace(batch=batch, rollouts=[rollout(index=n) for n in range(2)], metrics={})
    Distillation(choice=None, teachers=Teachers(), gives_advantages=True).score(prepared)  # type: ignore[arg-type]
    found = dict.fromkeys(("teacher_kl/maths", "teacher_kl/mean", "teacher_divergence"), pytest.approx(2.0))
    assert prepared.metrics == (found if trained else {})


class Result:
    formatted = 0

    def __repr__(self) -> str:
        Result.formatted += 1
        return "a long text"


async def result() -> Result:
    return Result()


def test_the_result_is_returned_and_never_formatted_as_text() -> None:
    with asyncio.Runner() as runner:
        assert isinstance(run_on(runner, result()), Result)
    assert Result.formatted == 0


def test_errors_are_raised_as_they_are() -> None:
    async def fail() -> None:
        raise LookupError("gone")

    with asyncio.Runner() as runner, pytest.raises(LookupError, match="gone"):
        run_on(runner, fail())
