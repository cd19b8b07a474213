from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nemotron_steps.config.schema.rl import LossFnConfig
from nemotron_steps.engine.grpo.rollout_metrics import (
    completion_metrics,
    environment_metrics,
    policy_lag_metrics,
    reward_metrics,
)
from nemotron_steps.engine.losses.loss import (
    LossNormalizers,
    combine_updates,
    count_normalizers,
    finalize_metrics,
    merge_metric_sums,
)
from nemotron_steps.engine.losses.policy_gradient import PolicyGradientLoss
from tests.engine.engine_samples import random_batch, rollout, rows_of


def test_sums_add_and_extrema_do_not() -> None:
    parts = [
        {"token_mult_prob_error": torch.tensor(3.0), "probs_ratio_min": torch.tensor(0.5), "loss": torch.tensor(0.1)},
        {"token_mult_prob_error": torch.tensor(5.0), "probs_ratio_min": torch.tensor(0.9), "loss": torch.tensor(0.2)},
    ]
    metrics = finalize_metrics(merge_metric_sums(parts), LossNormalizers(4.0, 2.0))
    assert metrics["token_mult_prob_error"] == 2.0
    assert metrics["probs_ratio_min"] == 0.5
    assert metrics["loss"] == pytest.approx(0.3)


def test_a_metric_nobody_declared_is_an_error() -> None:
    with pytest.raises(KeyError):
        finalize_metrics({"mystery": torch.tensor(1.0)}, LossNormalizers(1.0, 1.0))


def test_the_updates_of_a_step_report_what_one_update_on_all_of_it_would() -> None:
    whole, lp = random_batch(rows=6, seed=4)
    loss_fn = PolicyGradientLoss(LossFnConfig(use_importance_sampling_correction=True))

    def metrics_of(rows: list[int]) -> dict[str, float]:
        batch = rows_of(whole, rows)
        normalizers = count_normalizers(batch)
        return finalize_metrics(loss_fn(lp[rows], batch, normalizers)[1], normalizers)

    parts = [metrics_of([0, 1, 2]), metrics_of([3, 4]), metrics_of([5])]
    assert len({part["num_valid_tokens"] for part in parts}) == 3
    found, expected = combine_updates(parts), metrics_of(list(range(6)))
    losses = {"loss", "actor_loss"}  # each update's is over its own batch
    assert {n: v for n, v in found.items() if n not in losses} == pytest.approx(
        {n: v for n, v in expected.items() if n not in losses}, rel=1e-5
    )
    assert found["loss"] == pytest.approx(sum(part["loss"] for part in parts) / 3)


@pytest.mark.parametrize(
    ("name", "mean"), [("nll", 1.75), ("sequence_importance_ratio", 1.9), ("accuracy", 1.9), ("loss", 1.5), ("lr", 1.5)]
)
def test_a_mean_of_updates_is_weighed_with_what_it_is_a_mean_over(name: str, mean: float) -> None:
    updates = [
        {"num_valid_tokens": 10.0, "num_valid_samples": 2.0, name: 1.0},
        {"num_valid_tokens": 30.0, "num_valid_samples": 18.0, name: 2.0},
    ]
    assert combine_updates(updates) == {"num_valid_tokens": 40.0, "num_valid_samples": 20.0, name: pytest.approx(mean)}


def test_sums_are_divided_by_what_they_are_sums_over() -> None:
    names = ("entropy", "sequence_is_oob_ratio", "rewards_margin", "loss", "num_valid_samples", "probs_ratio_max")
    metrics = finalize_metrics({name: torch.tensor(12.0) for name in names}, LossNormalizers(24.0, 8.0))
    assert [metrics[name] for name in names] == [0.5, 1.5, 3.0, 12.0, 12.0, 12.0]


def test_an_update_that_trained_nothing_does_not_hide_the_others() -> None:
    nothing = {"num_valid_tokens": 0.0, "approx_entropy": 0.0, "grad_norm": math.nan, "loss": 0.0}
    something = {"num_valid_tokens": 8.0, "approx_entropy": 2.0, "grad_norm": 1.0, "loss": 1.0, "probs_ratio_max": 3.0}
    assert combine_updates([something, nothing]) == {**something, "loss": 0.5}
    assert combine_updates([nothing, nothing])["approx_entropy"] == 0.0
    assert math.isnan(combine_updates([nothing])["grad_norm"])


def test_data_parallel_ranks_agree_with_one_process(tmp_path: Path) -> None:
    script = Path(__file__).with_name("reduce_metrics.py")
    subprocess.run([sys.executable, str(script), str(tmp_path)], check=True, timeout=120)
    batch, lp = random_batch(rows=6, seed=2)
    normalizers = count_normalizers(batch)
    _, sums = PolicyGradientLoss(LossFnConfig(reference_policy_kl_penalty=0.1))(lp, batch, normalizers)
    expected = finalize_metrics(sums, normalizers)
    for rank in range(2):
        got = json.loads((tmp_path / f"{rank}.json").read_text())
        assert got == pytest.approx(expected, rel=1e-5, abs=1e-7)


def test_rewards_are_reported_per_environment_without_failures() -> None:
    rollouts = [
        rollout(reward=1.0), rollout(reward=0.0), rollout(reward=3.0, environment="code"),
        rollout(reward=float("nan"), environment="code", failure="sandbox"),
    ]  # fmt: skip
    metrics = reward_metrics(rollouts, torch.tensor([1.0, 0.0, 3.0, 9.0], dtype=torch.float64))
    assert metrics["reward/maths/mean"] == 0.5 and metrics["reward/maths/std"] == 0.5
    assert metrics["reward/code/mean"] == 3.0 and metrics["reward/code/std"] == 0.0
    assert metrics["reward/mean"] == pytest.approx(4 / 3) and metrics["reward/max"] == 3.0
    assert reward_metrics([rollouts[3]], torch.tensor([0.0])) == {}


def test_policy_lag_is_a_histogram_over_tokens() -> None:
    rollouts = [rollout(weight_versions=[4, 4, 5, 5]), rollout(weight_versions=[5] * 4)]
    metrics = policy_lag_metrics(rollouts, 5)
    assert metrics == {
        "policy_lag/share_0": 0.75, "policy_lag/share_1": 0.25, "policy_lag/mean": 0.25, "policy_lag/max": 1.0,
    }  # fmt: skip
    assert policy_lag_metrics([], 5) == {}


def test_unsampled_rollouts_do_not_dilute_lengths_or_truncation() -> None:
    rollouts = [rollout(truncated=True), rollout(weight_versions=[], failure="prompt_too_long", truncated=True)]
    metrics = completion_metrics(rollouts)
    assert metrics["truncation_rate"] == 1.0 and metrics["failure_rate"] == 0.5
    assert metrics["failures/prompt_too_long"] == 0.5 and metrics["response_length/mean"] == 4.0


def test_failures_of_what_dynamic_sampling_left_out_are_counted_as_well() -> None:
    metrics = completion_metrics([rollout(), rollout(failure="scorer_failed")], ["judge_unavailable", None])
    assert metrics["failure_rate"] == 0.5
    assert metrics["failures/judge_unavailable"] == metrics["failures/scorer_failed"] == 0.25


def test_lengths_and_failures_are_told_apart_by_environment_where_there_are_several() -> None:
    maths, code = rollout(environment="maths"), rollout(environment="code")
    failed = rollout(environment="code", failure="tests_timeout", weight_versions=[])
    assert environment_metrics([maths, code, failed]) == {
        "response_length/code/mean": 4.0,
        "failure_rate/code": 0.5,
        "response_length/maths/mean": 4.0,
        "failure_rate/maths": 0.0,
    }
    assert environment_metrics([code, failed]) == {}
