"""The GRPO loop for real: megatron-core policy, embedded generator, an environment, checkpoints."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest

from nemotron_steps.config.schema.rl import RlConfig
from nemotron_steps.engine.async_grpo import train_async
from nemotron_steps.engine.data import read_rows
from nemotron_steps.engine.grpo import train
from nemotron_steps.environments import registry
from nemotron_steps.environments.base import Environment, Response, Session, Verdict
from nemotron_steps.errors import JudgeUnavailableError, NonFiniteLossError, UnsupportedError
from nemotron_steps.runs.tracker import Tracker
from nemotron_steps.steps.rl.training import build_run
from tests.benchmarks.grpo_task import make_checkpoint, prompts, reward_of, write_rows


class Vowels(Environment):
    name = "vowels"

    async def verify(self, row, response: Response, session: Session) -> Verdict:
        return Verdict(reward_of(response.text))


class Silent(Environment):
    """An environment whose judge never answers."""

    name = "silent"

    async def verify(self, row, response: Response, session: Session) -> Verdict:
        raise JudgeUnavailableError("no answer")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    make_checkpoint(folder)
    write_rows(folder / "train.jsonl", prompts(128))
    return folder


@pytest.fixture(autouse=True)
def environments(monkeypatch):
    import sys

    module = sys.modules[__name__]
    monkeypatch.setitem(registry.BUILT_IN, "vowels", f"{module.__name__}:Vowels")
    monkeypatch.setitem(registry.BUILT_IN, "silent", f"{module.__name__}:Silent")


def config_of(checkpoint, steps, **changes):
    values = {
        "grpo": {
            "num_prompts_per_step": 4,
            "num_generations_per_prompt": 8,
            "max_num_steps": steps,
            "max_num_epochs": 9,
        },
        "loss_fn": {"force_on_policy_ratio": True},
        "policy": {
            "checkpoint": str(checkpoint),
            "precision": "float32",
            "train_micro_batch_size": 32,
            "logprob_batch_size": 32,
            "max_total_sequence_length": 96,
            "megatron_cfg": {"optimizer": {"lr": 2e-3}},
            "generation": {"max_new_tokens": 16, "max_sequences": 32},
        },
        "data": {"train": {"data_path": str(checkpoint / "train.jsonl")}},
        "checkpointing": {"save_period": 3, "keep_top_k": None},
    }
    for dotted, value in changes.items():
        node = values
        *parents, last = dotted.split("__")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return RlConfig.model_validate(values)


def start(config, work, records=None):
    listener = None if records is None else records.append
    context = SimpleNamespace(config=config, work=work, tracker=Tracker("test", None, listener))
    run, _ = build_run(context, read_rows(config.data.train.data_path), [])
    return run


def metrics_of(records):
    return [r["values"] for r in records if r["kind"] == "metrics"]


def test_reward_rises_and_generator_and_policy_agree(checkpoint, tmp_path):
    records = []
    run = start(config_of(checkpoint, 14, loss_fn__reference_policy_kl_penalty=1e-4), tmp_path, records)
    train(run)
    metrics = metrics_of(records)
    rewards = [m["reward/mean"] for m in metrics]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.05
    # Recorded sampling logprobs equal the policy's own at every step, the last included: no weight-sync drift.
    assert max(m["token_mult_prob_error"] for m in metrics) < 1 + 1e-4
    assert metrics[0]["kl_penalty"] == pytest.approx(0.0, abs=1e-6) and metrics[-1]["kl_penalty"] > 0


@pytest.mark.parametrize("save_async", [False, True])
def test_a_resumed_run_is_bit_identical_to_an_unbroken_one(save_async, checkpoint, tmp_path):
    whole, first, second = [], [], []
    config = config_of(checkpoint, 6, checkpointing__save_async=save_async)
    train(start(config_of(checkpoint, 6), tmp_path / "whole", whole))
    broken = start(config, tmp_path / "broken", first)
    broken.reporter._listener = lambda record: first.append(record) or _stop_after(record, 4)
    with pytest.raises(KeyboardInterrupt):
        train(broken)
    resumed = start(config, tmp_path / "broken", second)
    train(resumed)
    assert [m["loss"] for m in metrics_of(whole)][3:] == [m["loss"] for m in metrics_of(second)]
    assert [m["reward/mean"] for m in metrics_of(whole)][3:] == [m["reward/mean"] for m in metrics_of(second)]


def _stop_after(record, step):
    if record["kind"] == "metrics" and record["index"] == step:
        raise KeyboardInterrupt


def test_asynchronous_training_learns_and_never_trains_on_tokens_older_than_the_bound(checkpoint, tmp_path):
    records = []
    config = config_of(
        checkpoint,
        14,
        grpo__async_grpo={"enabled": True, "max_trajectory_age_steps": 1},
        loss_fn__use_importance_sampling_correction=True,
        loss_fn__truncated_importance_sampling_type="tis",
        loss_fn__truncated_importance_sampling_ratio=5,
    )
    train_async(start(config, tmp_path, records))
    metrics = metrics_of(records)
    rewards = [m["reward/mean"] for m in metrics]
    assert len(rewards) == 14
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.04
    assert max(m["policy_lag/max"] for m in metrics) <= 1


def test_asynchronous_checkpoints_resume_without_losing_or_repeating_a_prompt(checkpoint, tmp_path):
    config = config_of(checkpoint, 6, grpo__async_grpo={"enabled": True})
    first, second = [], []
    broken = start(config, tmp_path, first)
    broken.reporter._listener = lambda record: first.append(record) or _stop_after(record, 4)
    with pytest.raises(KeyboardInterrupt):
        train_async(broken)
    state = json.loads((tmp_path / "checkpoints" / "step_00000003" / "state.json").read_text())
    taken = state["buffer"]["counts"]["taken"]
    assert taken == 3 * 4
    summary = train_async(start(config, tmp_path, second))
    assert summary["steps"] == 6
    final = metrics_of(second)[-1]
    assert final["async/taken"] == 6 * 4


def test_a_judge_that_never_answers_is_an_error_and_not_a_reward_of_zero(checkpoint, tmp_path):
    config = config_of(checkpoint, 2, env={"should_use_nemo_gym": False, "environment": "silent"})
    with pytest.raises(JudgeUnavailableError, match="judge"):
        train(start(config, tmp_path))


def test_nan_stops_before_the_update(checkpoint, tmp_path):
    run = start(config_of(checkpoint, 3), tmp_path)
    before = {name: tensor.clone() for name, tensor in run.policy.weights()}
    loss_fn = run.policy.loss_fn
    run.policy.loss_fn = lambda *a, **k: (loss_fn(*a, **k)[0] * math.nan, loss_fn(*a, **k)[1])
    with pytest.raises(NonFiniteLossError):
        train(run)
    assert all(bool((tensor == before[name]).all()) for name, tensor in run.policy.weights())


@pytest.mark.parametrize(
    "changes", [{"policy__generation__colocated": {"enabled": False}}, {"cluster__policy_workers": 2}]
)
def test_what_needs_several_processes_is_refused_in_one_before_anything_loads(checkpoint, tmp_path, changes):
    with pytest.raises(UnsupportedError, match="need Ray"):
        start(config_of(checkpoint, 1, **changes), tmp_path)
