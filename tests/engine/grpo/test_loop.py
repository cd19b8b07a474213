"""The GRPO loop for real: megatron-core policy, embedded generator, an environment, checkpoints."""

from __future__ import annotations

import gc
import json
import math
import time
from collections import Counter
from types import SimpleNamespace

import pytest

from nemotron_steps.engine import checkpoints
from nemotron_steps.engine.grpo.loop import train
from nemotron_steps.engine.losses.policy_gradient import PolicyGradientLoss
from nemotron_steps.engine.rollouts.data import read_rows
from nemotron_steps.errors import (
    ConfigError,
    JudgeUnavailableError,
    NonFiniteLossError,
    RetryableError,
    UnsupportedError,
)
from tests.engine.grpo.grpo_environments import Marked
from tests.engine.grpo.grpo_runs import config_of, events_of, marked, metrics_of, run_loop, start, stop_after


def test_reward_rises_and_generator_and_policy_agree(task, tmp_path):
    records = []
    run = start(config_of(task, 14, loss_fn__reference_policy_kl_penalty=1e-4), tmp_path, records)
    train(run)
    metrics = metrics_of(records)
    rewards = [m["reward/mean"] for m in metrics]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.05
    # Recorded sampling logprobs equal the policy's own at every step, the last included: no weight-sync drift.
    assert max(m["token_mult_prob_error"] for m in metrics) < 1 + 1e-4
    assert metrics[0]["kl_penalty"] == pytest.approx(0.0, abs=1e-6) and metrics[-1]["kl_penalty"] > 0


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_the_objects_of_a_run_that_goes_on_are_left_out_of_collections_until_it_ends(
    asynchronous, task, tmp_path, monkeypatch
):
    monkeypatch.setattr("nemotron_steps.engine.grpo.loop.SETTLED", 2)
    gc.unfreeze()
    for steps in (1, 2):
        changes = {"grpo__async_grpo__enabled": asynchronous, "checkpointing__enabled": False}
        run = start(config_of(task, steps, environment="vowels", **changes), tmp_path)
        run_loop(run)
        assert (gc.get_freeze_count() > 100_000) is (steps == 2)
        run.close()
        assert gc.get_freeze_count() == 0


PLAIN: dict = {}
ASYNC_SAVES = {"checkpointing__save_async": True}
SCHEDULES = {
    "grpo__use_dynamic_sampling": True,
    "grpo__num_generations_per_prompt": 2,
    "grpo__low_effort": {"string": "a", "weight": 0.2, "upper_bound_tokens": 4},
    "grpo__epsilon_filtering": {"enabled": True, "epsilon": 0.1},
    "policy__max_total_sequence_length_end": 128,
    "environment": "any_vowel",
}


@pytest.mark.parametrize("changes", [PLAIN, ASYNC_SAVES, SCHEDULES], ids=["plain", "save_async", "schedules"])
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


def test_a_decay_without_an_end_of_its_own_ends_with_the_last_update_of_the_last_step(task, tmp_path):
    records = []
    decay = {"optimizer": {"lr": 1e-3, "min_lr": 1e-4}, "scheduler": {"lr_decay_style": "linear"}}
    two_updates = {"policy__train_global_batch_size": 16, "loss_fn__force_on_policy_ratio": False}
    train(start(config_of(task, 3, policy__megatron_cfg=decay, **two_updates), tmp_path, records))
    rates = [1e-3 - 9e-4 * update / 6 for update in range(6)]
    expected = [sum(rates[at : at + 2]) / 2 for at in (0, 2, 4)]
    assert [m["lr"] for m in metrics_of(records)] == pytest.approx(expected)


def test_the_rate_of_generation_counts_groups_that_dynamic_sampling_leaves_out(task, tmp_path):
    records = []
    changes = {"grpo__use_dynamic_sampling": True, "grpo__num_generations_per_prompt": 2}
    run = start(config_of(task, 3, environment="any_vowel", **changes), tmp_path, records)
    train(run)
    metrics = metrics_of(records)
    assert max(m["dynamic_sampling/discarded_share"] for m in metrics) > 0
    sampled = sum(m["tokens/generated_per_s"] * m["timing/generation_s"] for m in metrics)
    assert sampled == pytest.approx(run.sampler.generated_tokens)


def test_a_generation_batch_of_dynamic_sampling_may_hold_more_prompts_than_a_step(task, tmp_path, monkeypatch):
    monkeypatch.setattr(Marked, "asked", Counter())
    rows = marked(read_rows(task / "train.jsonl")[:12], number=range(12), differs=[False, *[True] * 11])
    records = []
    changes = {"grpo__use_dynamic_sampling": True, "grpo__batch_multiplier": 1.7}
    run = start(config_of(task, 1, environment="marked", **changes), tmp_path, records, rows)
    assert train(run)["steps"] == 1
    assert sum(Marked.asked.values()) == 6  # 4 x 1.7, rounded down
    (metrics,) = metrics_of(records)
    assert metrics["groups/count"] == 4 and metrics["dynamic_sampling/batches"] == 1


def test_a_prompt_is_trained_on_if_its_judge_answers_the_last_time_and_dropped_if_not(task, tmp_path, monkeypatch):
    monkeypatch.setattr(Marked, "asked", Counter())
    rows = marked(read_rows(task / "train.jsonl")[:8], number=range(8), differs=[True] * 8, silent=[2, 3] + [0] * 6)
    records = []
    run = start(config_of(task, 1, environment="marked", grpo__use_dynamic_sampling=True), tmp_path, records, rows)
    with pytest.MonkeyPatch.context() as patch:  # in file order
        patch.setattr(run.prompts, "_shuffle", False)
        train(run)
    assert [Marked.asked[i] for i in range(2)] == [3, 3]
    assert [event["where"] for event in events_of(records, "prompt_dropped")] == [rows[1].where]


def test_validation_begins_where_it_is_told_to_with_a_number_of_rollouts_of_its_own(task, tmp_path):
    records = []
    changes = {"grpo__val_period": 1, "grpo__val_start_at": 2, "grpo__num_val_generations_per_prompt": 3}
    run = start(config_of(task, 3, **changes), tmp_path, records)
    run.validation = read_rows(task / "train.jsonl")[:2]
    train(run)
    assert [step.get("validation/samples") for step in metrics_of(records)] == [None, 6, 6]


def test_a_judge_that_never_answers_is_an_error_and_not_a_reward_of_zero(task, tmp_path):
    config = config_of(task, 2, environment="silent")
    with pytest.raises(JudgeUnavailableError, match="judge"):
        train(start(config, tmp_path))


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


@pytest.mark.parametrize(
    "changes", [{"policy__generation__colocated": {"enabled": False}}, {"cluster__policy_workers": 2}]
)
def test_what_needs_several_processes_is_refused_in_one_before_anything_loads(task, tmp_path, changes):
    with pytest.raises(UnsupportedError, match="need Ray"):
        start(config_of(task, 1, **changes), tmp_path)


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


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_time_spent_before_training_counts_against_the_runs_time(asynchronous, task, tmp_path):
    changes = {"grpo__async_grpo__enabled": asynchronous, "checkpointing__checkpoint_must_save_by": "01:00"}
    with pytest.raises(RetryableError, match="time is over") as caught:
        run_loop(start(config_of(task, 9, **changes), tmp_path, [], begun_s_ago=3600.0))
    assert caught.value.found == "1 trained"


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_what_loading_took_is_not_expected_of_the_next_step(asynchronous, task, tmp_path, monkeypatch):
    ahead = [0.0]
    monkeypatch.setattr(checkpoints, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + ahead[0]))
    changes = {"grpo__async_grpo__enabled": asynchronous, "checkpointing__checkpoint_must_save_by": "01:00"}
    run = start(config_of(task, 2, **changes), tmp_path, [])
    ahead[0] = 2000.0  # of the hour; steps that took as long would not fit in
    assert run_loop(run)["steps"] == 2


def test_checkpoints_may_be_ranked_by_a_validation_that_is_still_to_come_but_not_by_what_never_comes(task, tmp_path):
    changes = {"checkpointing__save_period": 1, "grpo__val_period": 2, "checkpointing__keep_top_k": 1}
    run = start(config_of(task, 3, **changes, checkpointing__metric_name="validation/reward"), tmp_path / "validated")
    run.validation = read_rows(task / "train.jsonl")[:2]
    assert train(run)["steps"] == 3
    assert [c.step for c in run.checkpoints.all()] == [2, 3]  # the one that was validated, and the newest
    run = start(config_of(task, 3, **changes, checkpointing__metric_name="validation/rewards"), tmp_path / "misspelt")
    with pytest.raises(ConfigError, match="no step has reported the metric validation/rewards") as caught:
        train(run)
    assert caught.value.hints[0] == "checkpointing.metric_name=validation/reward"
