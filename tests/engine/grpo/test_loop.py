"""The GRPO loop for real: megatron-core policy, embedded generator, an environment, checkpoints."""

import json
import math

import pytest

from nemotron_steps.engine.grpo.loop import train
from nemotron_steps.engine.losses.policy_gradient import PolicyGradientLoss
from nemotron_steps.engine.rollouts.data import read_rows
from nemotron_steps.errors import (
    NonFiniteLossError,
    RetryableError,
)
from tests.engine.grpo.grpo_runs import config_of, metrics_of, run_loop, start, stop_after


def test_reward_rises_and_generator_and_policy_agree(task, tmp_path):
    records = []
    run = start(config_of(task, 14, loss_fn__reference_policy_kl_penalty=1e-4), tmp_path, records)
    assert run.signals.reward_range == (0.0, 1.0)  # of the one environment that it is trained on
    train(run)
    metrics = metrics_of(records)
    rewards = [m["reward/mean"] for m in metrics]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.05
    # Recorded sampling logprobs equal the policy's own at every step, the last included: no weight-sync drift.
    assert max(m["token_mult_prob_error"] for m in metrics) < 1 + 1e-4
    assert metrics[0]["kl_penalty"] == pytest.approx(0.0, abs=1e-6) and metrics[-1]["kl_penalty"] > 0


ASYNC_SAVES = {"checkpointing__save_async": True}
SCHEDULES = {
    "grpo__use_dynamic_sampling": True,
    "grpo__num_generations_per_prompt": 2,
    "grpo__low_effort": {"string": "a", "weight": 0.2, "upper_bound_tokens": 4},
    "grpo__epsilon_filtering": {"enabled": True, "epsilon": 0.1},
    "policy__max_total_sequence_length_end": 128,
    "environment": "any_vowel",
}


@pytest.mark.parametrize("changes", [ASYNC_SAVES, SCHEDULES], ids=["save_async", "schedules"])
def test_a_resumed_run_is_bit_identical_to_an_unbroken_one(changes, task, tmp_path):
    whole, first, second = [], [], []
    config = config_of(task, 6, **changes)
    rows = read_rows(task / "train.jsonl")[:16]  # six steps go through them more than once
    train(start(config, tmp_path / "whole", whole, rows))
    broken = start(config, tmp_path / "broken", first, rows)
    stop_after(broken, 4)
    with pytest.raises(KeyboardInterrupt):
        train(broken)
    train(start(config, tmp_path / "broken", second, rows))
    assert len(metrics_of(whole)) == 6
    for name in ("loss", "grad_norm", "reward/mean"):
        assert [m[name] for m in metrics_of(whole)][3:] == [m[name] for m in metrics_of(second)]
    if changes is SCHEDULES:
        metrics = metrics_of(whole)
        assert max(m["dynamic_sampling/discarded_share"] for m in metrics) > 0
        assert max(m["dynamic_sampling/surplus_groups"] for m in metrics) > 0


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_rollouts_grow_as_long_as_the_schedule_allows_at_their_step_and_no_longer(asynchronous, task, tmp_path):
    rows = read_rows(task / "train.jsonl")[:16]
    changes = {"grpo__async_grpo__enabled": asynchronous, "policy__generation__max_new_tokens": 64}
    start_length, end_length = 40, 64
    lengths = {"policy__max_total_sequence_length": start_length, "policy__max_total_sequence_length_end": end_length}
    run = start(config_of(task, 5, **changes, **lengths), tmp_path, None, rows)
    longest = []
    train_step = run.policy.train_step
    run.policy.train_step = lambda batch: longest.append(int(batch.lengths.max())) or train_step(batch)
    run_loop(run)
    allowed = [40, 46, 52, 58, 64]
    assert len(longest) == 5 and all(length <= limit for length, limit in zip(longest, allowed, strict=True))
    assert longest[0] == start_length and longest[-1] > 52


class NanLoss(PolicyGradientLoss):
    def __call__(self, *args, **kwargs):
        loss, sums = super().__call__(*args, **kwargs)
        return loss * math.nan, sums


def test_nan_stops_before_the_update(task, tmp_path):
    run = start(config_of(task, 3), tmp_path)
    before = {name: tensor.clone() for name, tensor in run.policy.weights()}
    run.policy.loss_fn = NanLoss(run.config.loss_fn)
    with pytest.raises(NonFiniteLossError):
        train(run)
    assert all(bool((tensor == before[name]).all()) for name, tensor in run.policy.weights())


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_run_whose_time_is_over_is_saved_and_ends_without_a_model(asynchronous, task, tmp_path):
    changes = {"grpo__async_grpo__enabled": asynchronous, "checkpointing__save_async": asynchronous}
    late = config_of(task, 2, checkpointing__checkpoint_must_save_by="00:00", **changes)
    with pytest.raises(RetryableError, match="time is over"):
        run_loop(start(late, tmp_path, []))
    state = json.loads((tmp_path / "checkpoints" / "step_00000001" / "state.json").read_text())
    values = state["signals"]["history"]["reward/mean"][1]
    assert len(values) == 1  # signals know the step they are saved with
    records = []
    assert run_loop(start(config_of(task, 2, **changes), tmp_path, records))["steps"] == 2
    assert len(metrics_of(records)) == 1
