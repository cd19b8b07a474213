"""What counts in a batch: the mask of every loss, and the metrics that are of trained tokens alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from nemotron_steps.config.schema.dpo import DpoTrainConfig
from nemotron_steps.config.schema.grpo import LossFnConfig
from nemotron_steps.engine.losses.distillation import DistillationLoss, TeacherKl
from nemotron_steps.engine.losses.loss import LossNormalizers, count_normalizers, finalize_metrics, loss_mask
from nemotron_steps.engine.losses.policy_gradient import PolicyGradientLoss
from nemotron_steps.engine.losses.supervised import DpoLoss, NegativeLogLikelihood
from tests.engine.engine_samples import random_batch


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
