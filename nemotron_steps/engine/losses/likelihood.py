"""The loss of supervised fine-tuning: the negative log likelihood of trained tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nemotron_steps.engine.losses.loss import Loss
from nemotron_steps.engine.losses.metrics import MetricSums
from nemotron_steps.engine.losses.reduction import (
    LossNormalizers,
    counts,
    loss_mask,
    masked_sum,
    reduce_over_batch,
)

if TYPE_CHECKING:
    from nemotron_steps.engine.types import TrainBatch


class NegativeLogLikelihood(Loss):
    """Sum over trained tokens of -lp, / N_tokens of the global batch."""

    def __call__(
        self,
        logprobs: torch.Tensor,
        batch: TrainBatch,
        normalizers: LossNormalizers,
        entropy: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, MetricSums]:
        """Loss and metric sums of one micro-batch; arguments as `Loss.__call__`."""
        mask = loss_mask(batch.token_mask, batch.sample_mask)
        loss = reduce_over_batch(-logprobs.float(), mask, normalizers, token_level=True)
        with torch.no_grad():
            sums = {"loss": loss.detach(), "nll": masked_sum(-logprobs.float(), mask), **counts(batch, mask)}
            if entropy is not None:
                sums["entropy"] = masked_sum(entropy.float(), mask)
        return loss, sums
