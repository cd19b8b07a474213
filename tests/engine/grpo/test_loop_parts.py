"""Decisions of the loop that need no policy and no generator: when to validate, what to try again, what to say."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemotron_steps.config.schema.grpo import GrpoConfig
from nemotron_steps.config.schema.rl import HeldoutConfig
from nemotron_steps.engine.grpo import loop
from nemotron_steps.engine.grpo.distillation import METADATA_KEY, Distillation
from nemotron_steps.engine.grpo.loop import StepRecord
from nemotron_steps.engine.rollouts.data import PromptRow
from nemotron_steps.engine.types import RolloutGroup, SamplingParams
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


def test_a_prompt_is_tried_three_times_in_a_step_and_then_dropped_with_a_word() -> None:
    run, record = a_run(0), StepRecord()
    prompts = [PromptRow(n, {}, f"f:{n + 1}") for n in range(2)]
    assert [loop._is_tried_again(run, prompts[0], record) for _ in range(3)] == [True, True, False]
    assert loop._is_tried_again(run, prompts[1], record)
    assert run.reporter.events == [("prompt_dropped", {"where": "f:1", "failures": 3})]
    assert record.retries == {0: 2, 1: 1}


@pytest.mark.parametrize(
    ("step", "kept", "offered", "again"), [(0, 0, 8, False), (1, 0, 8, True), (0, 1, 8, True), (0, 0, 0, True)]
)
def test_another_epoch_is_advised_where_it_could_help(step: int, kept: int, offered: int, again: bool) -> None:
    error = loop.prompts_used_up(a_run(step, max_num_epochs=2, num_prompts_per_step=4), kept, offered)
    assert ("grpo.max_num_epochs=3" in error.hints) is again
    assert error.found == f"{kept} of {offered}" and (error.expected or "").startswith("4 groups")


@pytest.mark.parametrize(
    ("rewards", "shown"),
    [([0.5, 1.0, 0.0], [("best", 1.0), ("worst", 0.0)]), ([0.5], [("best", 0.5)]), ([None, 0.2], [("best", 0.2)])],
)
def test_the_best_and_the_worst_graded_answer_are_shown(rewards: list[Any], shown: list[Any]) -> None:
    rollouts = [
        rollout("g", n, reward=math.nan if r is None else r, failure="lost" if r is None else None)
        for n, r in enumerate(rewards)
    ]
    run = a_run(3)
    run.collector = SimpleNamespace(shown=lambda rollout: {"response": f"<|im_start|>{rollout.index}"})
    loop._report_sample(run, [RolloutGroup("g", 0, rollouts, 0), RolloutGroup("h", 1, [], 0)])
    assert [(sample["which"], sample["reward"]) for sample in run.reporter.samples] == shown
    assert all(sample["step"] == 3 and "<|im_start|>" in sample["response"] for sample in run.reporter.samples)


@pytest.mark.parametrize(("max_prompts", "asked"), [(None, 3), (2, 2)])
def test_heldout_prompts_are_graded_as_their_own_settings_say(max_prompts: int | None, asked: int) -> None:
    calls: list[dict[str, Any]] = []

    class Collector:
        params = SamplingParams(max_new_tokens=7, temperature=0.9)

        def environment_named(self, name: str) -> str:
            return f"the {name}"

        async def collect(self, prompts: Any, **settings: Any) -> list[RolloutGroup]:
            calls.append({"prompts": len(prompts), **settings})
            return [RolloutGroup("a", 0, [rollout("a", reward=0.5)], 0)]

    run = a_run(4)
    run.collector = Collector()
    run.config.heldout = HeldoutConfig(
        environment="rule", max_prompts=max_prompts, samples_per_prompt=3, temperature=0.25
    )
    rows = [PromptRow(n, {}, f"f:{n}") for n in range(3)]
    assert asyncio.run(loop.evaluate_heldout(run, rows, "after")).reward == 0.5
    assert calls == [
        {
            "prompts": asked,
            "group_ids": [f"heldout/after/{n}" for n in range(asked)],
            "num_generations": 3,
            "environment": "the rule",
            "params": SamplingParams(max_new_tokens=7, temperature=0.25),
        }
    ]


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
