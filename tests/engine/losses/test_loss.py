"""None"""

import math
from typing import Any

import pytest
import torch

from nemotron_steps.config.schema.dpo import DpoTrainConfig
from nemotron_steps.config.schema.grpo import LossFnConfig
from nemotron_steps.engine.grpo.step import (
    rollout_metrics,
)
from nemotron_steps.engine.losses.distillation import DistillationLoss, TeacherKl
from nemotron_steps.engine.losses.loss import (
    LossNormalizers,
    combine_updates,
    count_normalizers,
    finalize_metrics,
    loss_mask,
    merge_metric_sums,
)
from nemotron_steps.engine.losses.policy_gradient import PolicyGradientLoss
from nemotron_steps.engine.losses.supervised import DpoLoss, NegativeLogLikelihood
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


def test_rewards_are_reported_per_environment_without_failures() -> None:
    rollouts = [
        rollout(reward=1.0), rollout(reward=0.0), rollout(reward=3.0, environment="code"),
        rollout(reward=float("nan"), environment="code", failure="sandbox"),
    ]  # fmt: skip
    metrics = rollout_metrics(rollouts, torch.tensor([1.0, 0.0, 3.0, 9.0], dtype=torch.float64), 0)
    assert metrics["reward/maths/mean"] == 0.5 and metrics["reward/maths/std"] == 0.5
    assert metrics["reward/code/mean"] == 3.0 and metrics["reward/code/std"] == 0.0
    assert metrics["reward/mean"] == pytest.approx(4 / 3) and metrics["reward/max"] == 3.0
    assert "reward/mean" not in rollout_metrics([rollouts[3]], torch.tensor([0.0]), 0)


def test_a_first_token_is_never_trained_as_nothing_predicts_it() -> None:
    token_mask = torch.tensor([[1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 1.0, 0.0]])
    assert loss_mask(token_mask, torch.tensor([1.0, 0.0])).tolist() == [[0.0, 1.0, 0.0, 0.0], [0.0] * 4]
    assert token_mask[0, 0] == 1.0
    batch, _ = random_batch(rows=2, width=4)
    batch.token_mask, batch.sample_mask = token_mask, torch.ones(2)
    assert count_normalizers(batch) == LossNormalizers(2.0, 2.0)


@pytest.mark.parametrize(
    "loss_fn",
    [
        NegativeLogLikelihood(),
        PolicyGradientLoss(LossFnConfig()),
        DpoLoss(DpoTrainConfig()),
        DistillationLoss(TeacherKl()),
    ],
    ids=lambda loss: type(loss).__name__,
)
def test_the_entropy_is_the_mean_over_trained_tokens(loss_fn: Any) -> None:
    batch, lp = random_batch()
    batch.sample_mask[3] = 0.0  # of rows 2 and 3, a pair, neither is trained
    mask = loss_mask(batch.token_mask, batch.sample_mask) > 0
    entropy = torch.rand(lp.shape, generator=torch.Generator().manual_seed(0))
    entropy[~mask] = math.nan
    more = {"divergence": torch.zeros_like(lp)} if isinstance(loss_fn, DistillationLoss) else {}
    normalizers = count_normalizers(batch)
    _, sums = loss_fn(lp, batch, normalizers, entropy, **more)
    metrics = finalize_metrics(sums, normalizers)
    assert metrics["entropy"] == pytest.approx(entropy[mask].mean().item(), rel=1e-5)
    assert (metrics["num_valid_tokens"], metrics["num_valid_samples"]) == (float(mask.sum()), 4.0)


def test_nll_is_the_mean_over_all_trained_tokens_of_the_global_batch() -> None:
    batch, lp = random_batch()
    normalizers = count_normalizers(batch)
    loss, sums = NegativeLogLikelihood()(lp, batch, normalizers)
    mask = loss_mask(batch.token_mask, batch.sample_mask).bool()
    assert loss.item() == pytest.approx(-lp.detach()[mask].double().mean().item(), rel=1e-6)
    assert finalize_metrics(sums, normalizers)["nll"] == pytest.approx(loss.item(), rel=1e-6)
    loss.backward()
    torch.testing.assert_close(lp.grad, -mask.float() / mask.sum())
