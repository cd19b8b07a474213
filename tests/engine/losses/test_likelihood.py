from __future__ import annotations

import pytest
import torch

from nemotron_steps.engine.losses.loss import count_normalizers, finalize_metrics, loss_mask
from nemotron_steps.engine.losses.supervised import NegativeLogLikelihood
from tests.engine.engine_samples import random_batch


def test_nll_is_the_mean_over_all_trained_tokens_of_the_global_batch() -> None:
    batch, lp = random_batch()
    normalizers = count_normalizers(batch)
    loss, sums = NegativeLogLikelihood()(lp, batch, normalizers)
    mask = loss_mask(batch.token_mask, batch.sample_mask).bool()
    assert loss.item() == pytest.approx(-lp.detach()[mask].double().mean().item(), rel=1e-6)
    assert finalize_metrics(sums, normalizers)["nll"] == pytest.approx(loss.item(), rel=1e-6)
    loss.backward()
    torch.testing.assert_close(lp.grad, -mask.float() / mask.sum())
