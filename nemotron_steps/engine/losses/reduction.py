"""Masks and global-batch reduction shared by every loss.

A loss is a sum over the trained tokens (or sequences) of a micro-batch divided by a count over the *global* batch:
all micro-batches of all data-parallel ranks. Gradients of micro-batches are then summed, over micro-batches and over
ranks (summed, not averaged), and neither micro-batch size, nor packing, nor parallel layout changes the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from nemotron_steps.engine.types import TrainBatch

EPSILON = 1e-8
"""Keeps an empty batch from dividing by zero; no float32 count of at least one is changed by it."""


@dataclass(frozen=True)
class LossNormalizers:
    """Counts over the global batch: every micro-batch of every data-parallel rank of one optimizer step."""

    tokens: float
    """Trained tokens: the sum of `loss_mask`."""
    sequences: float
    """Trained sequences: the sum of `sample_mask`."""


def loss_mask(token_mask: torch.Tensor, sample_mask: torch.Tensor) -> torch.Tensor:
    """Which tokens are trained: token mask x sample mask, without column 0, which nothing predicts.

    Args:
        token_mask: [n, T].
        sample_mask: [n].

    Returns:
        float32 [n, T] of zeros and ones.
    """
    mask = token_mask.float() * sample_mask.float().unsqueeze(-1)
    mask[:, :1] = 0.0
    return mask


def count_normalizers(batch: TrainBatch) -> LossNormalizers:
    """Counts of one batch. Sum them over micro-batches and data-parallel ranks before use."""
    mask = loss_mask(batch.token_mask, batch.sample_mask)
    return LossNormalizers(
        tokens=float(mask.sum(dtype=torch.float64)),
        sequences=float(batch.sample_mask.sum(dtype=torch.float64)),
    )


def counts(batch: TrainBatch, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """The metrics that say how much of a batch is trained."""
    return {"num_valid_tokens": mask.sum(), "num_valid_samples": batch.sample_mask.float().sum()}


def masked_sum(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sum of `values` where `mask` is non-zero, as a scalar. NaN and infinity under the mask do not leak."""
    return torch.where(mask > 0, values * mask, torch.zeros_like(values)).sum()


def sequence_means(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean over the masked tokens of each sequence, [n, T] -> [n]; 0 for a sequence with none."""
    total = torch.where(mask > 0, values * mask, torch.zeros_like(values)).sum(dim=-1)
    return total / (mask.sum(dim=-1) + EPSILON)


def reduce_over_batch(
    values: torch.Tensor, mask: torch.Tensor, normalizers: LossNormalizers, *, token_level: bool
) -> torch.Tensor:
    """This micro-batch's share of the global-batch mean of `values`, a scalar.

    Token level: sum(values * mask) / (N_tokens + 1e-8), every token of the batch weighs the same (DAPO,
    arXiv:2503.14476). Sequence level: the masked mean of each sequence, summed, / N_sequences (GRPO,
    arXiv:2402.03300), so that a token of a long sequence weighs less.

    Args:
        values: [n, T].
        mask: [n, T], from `loss_mask`.
        normalizers: global-batch counts.
        token_level: which of the two.
    """
    if token_level:
        return masked_sum(values, mask) / (normalizers.tokens + EPSILON)
    return sequence_means(values, mask).sum() / (normalizers.sequences + EPSILON)
