"""Importance weights between the policy that starts a training step and the generator that sampled.

The two differ because the generator computes in another precision or with other kernels, and, in asynchronous
training, because it samples with older weights. The weights here multiply the policy-gradient loss; they carry no
gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from nemotron_steps.engine.losses.reduction import sequence_means

TruncationType = Literal["tis", "icepop", "seq-mask-tis"]


@dataclass(frozen=True)
class ImportanceWeights:
    """Weights and what truncation did to them."""

    weights: torch.Tensor
    """[n, T] (token level) or [n, 1] (one weight per sequence)."""
    out_of_bounds: torch.Tensor | None
    """Like `weights` ([n, 1] for seq-mask-tis), 1 where a weight was cut or dropped; None without truncation."""


def importance_weights(
    prev_logprobs: torch.Tensor,
    generation_logprobs: torch.Tensor,
    mask: torch.Tensor,
    *,
    sequence_level: bool = False,
) -> torch.Tensor:
    """w = exp(lp_prev - lp_gen) per token, or exp(sum over trained tokens) per sequence; NaN and infinity become 0.

    Args:
        prev_logprobs: [n, T].
        generation_logprobs: [n, T].
        mask: [n, T]; positions with mask 0 have weight 1 (token level) or do not count (sequence level).
        sequence_level: one weight per sequence, the exact ratio of the sequences' probabilities.

    Returns:
        [n, T], or [n, 1] at sequence level.
    """
    difference = torch.where(mask > 0, prev_logprobs - generation_logprobs, torch.zeros_like(prev_logprobs))
    if sequence_level:
        difference = difference.sum(dim=-1, keepdim=True)
    return torch.nan_to_num(difference.exp(), nan=0.0, posinf=0.0, neginf=0.0)


def truncate_weights(
    weights: torch.Tensor,
    prev_logprobs: torch.Tensor,
    generation_logprobs: torch.Tensor,
    mask: torch.Tensor,
    *,
    kind: TruncationType,
    upper: float,
    lower: float | None,
) -> ImportanceWeights:
    """Bound importance weights.

    - tis: clamp to [lower or 0, upper] (truncated importance sampling, Yao et al. 2025). A weight that was not finite,
      hence 0, stays 0.
    - icepop: 0 outside [lower, upper] (arXiv:2510.18855).
    - seq-mask-tis: a sequence whose geometric mean exp(mean_t(lp_prev - lp_gen)) leaves [lower, upper] is dropped;
      the others keep their token weights as they are.

    Args:
        weights: from `importance_weights`, [n, T] or [n, 1].
        prev_logprobs: [n, T].
        generation_logprobs: [n, T].
        mask: [n, T].
        kind: which rule.
        upper: `truncated_importance_sampling_ratio`.
        lower: `truncated_importance_sampling_ratio_min`; icepop and seq-mask-tis need it.
    """
    if kind == "tis":
        floor = lower if lower is not None else 0.0
        outside = (weights > upper) | (weights < floor)
        clamped = torch.where(weights == 0, weights, weights.clamp(floor, upper))
        return ImportanceWeights(clamped, outside.float())
    if lower is None:
        raise ValueError(f"{kind} needs a lower bound")
    if kind == "icepop":
        outside = (weights > upper) | (weights < lower)
        return ImportanceWeights(torch.where(outside, torch.zeros_like(weights), weights), outside.float())
    if kind == "seq-mask-tis":
        log_ratio = torch.nan_to_num(prev_logprobs - generation_logprobs, nan=0.0, posinf=0.0, neginf=0.0)
        geometric_mean = sequence_means(log_ratio, mask).exp().unsqueeze(-1)
        outside = (geometric_mean > upper) | (geometric_mean < lower)
        return ImportanceWeights(torch.where(outside, torch.zeros_like(weights), weights), outside.float())
    raise ValueError(f"unknown truncation type {kind!r}; expected tis, icepop or seq-mask-tis")


def sequence_logprob_error(
    prev_logprobs: torch.Tensor, generation_logprobs: torch.Tensor, token_mask: torch.Tensor
) -> torch.Tensor:
    """mean_t exp|lp_gen - lp_prev| of each sequence, [n]: 1 when both agree; infinity when a logprob is not finite.

    A sequence above `grpo.seq_logprob_error_threshold` is dropped: trainer and generator disagree so much on it that it
    teaches noise.
    """
    error = (generation_logprobs - prev_logprobs).abs().exp()
    error = torch.nan_to_num(error, nan=torch.inf, posinf=torch.inf)
    return sequence_means(error, token_mask.float())
