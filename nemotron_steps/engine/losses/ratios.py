"""Two policies' logprobs of the same tokens: KL estimators, importance weights and their truncation."""

from dataclasses import dataclass
from typing import Literal

import torch

from nemotron_steps.engine.losses.loss import sequence_means

KlType = Literal["k1", "k2", "k3"]


def kl_divergence(
    logprobs: torch.Tensor,
    reference_logprobs: torch.Tensor,
    kind: KlType = "k3",
    *,
    input_clamp: float | None = 20.0,
    output_clamp: float | None = 10.0,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Nats of KL(policy || reference) per token, any shape, times `weights` where they are given.

    log r = clamp(lp_ref - lp, +-input_clamp); k1 = -log r; k2 = (log r)^2 / 2; k3 = exp(log r) - 1 - log r. Then the
    weights are multiplied in, and the product is clamped to +-output_clamp. A token whose log ratio is clamped has its
    weight detached, or the weight's gradient would go on pushing where the clamp means to stop.
    """
    unbounded = log_ratio = reference_logprobs - logprobs
    if input_clamp is not None:
        log_ratio = unbounded.clamp(-input_clamp, input_clamp)
        if weights is not None:
            weights = torch.where(log_ratio == unbounded, weights, weights.detach())
    if kind == "k1":
        divergence = -log_ratio
    elif kind == "k2":
        divergence = 0.5 * log_ratio.square()
    else:
        # expm1 keeps the digits that exp(x) - 1 loses near x = 0, where trained policies live.
        divergence = torch.expm1(log_ratio) - log_ratio
    if weights is not None:
        divergence = weights * divergence
    if output_clamp is not None:
        divergence = divergence.clamp(-output_clamp, output_clamp)
    return divergence


TruncationType = Literal["tis", "icepop", "seq-mask-tis"]


@dataclass(frozen=True)
class ImportanceWeights:
    """Weights, [n, T] or [n, 1]; and 1 where one was cut or dropped."""

    weights: torch.Tensor
    out_of_bounds: torch.Tensor | None


def importance_weights(
    prev_logprobs: torch.Tensor,
    generation_logprobs: torch.Tensor,
    mask: torch.Tensor,
    *,
    sequence_level: bool = False,
) -> torch.Tensor:
    """exp(lp_prev - lp_gen) per token, or over a sequence [n, 1]; 0 where not finite."""
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
    """Bound importance weights, [n, T] or [n, 1].

    - tis: clamp to [lower or 0, upper] (truncated importance sampling, Yao et al. 2025). A weight that was not finite,
      hence 0, stays 0.
    - icepop: 0 outside [lower, upper] (arXiv:2510.18855).
    - seq-mask-tis: a sequence whose geometric mean exp(mean_t(lp_prev - lp_gen)) leaves [lower, upper] is dropped.
    """
    if kind == "tis":
        floor = lower if lower is not None else 0.0
        outside = (weights > upper) | (weights < floor)
        clamped = torch.where(weights == 0, weights, weights.clamp(floor, upper))
        return ImportanceWeights(clamped, outside.float())
    assert lower is not None  # the config's rule
    judged = weights
    if kind == "seq-mask-tis":
        log_ratio = torch.nan_to_num(prev_logprobs - generation_logprobs, nan=0.0, posinf=0.0, neginf=0.0)
        judged = sequence_means(log_ratio, mask).exp().unsqueeze(-1)
    outside = (judged > upper) | (judged < lower)
    return ImportanceWeights(torch.where(outside, torch.zeros_like(weights), weights), outside.float())


def sequence_logprob_error(
    prev_logprobs: torch.Tensor, generation_logprobs: torch.Tensor, token_mask: torch.Tensor
) -> torch.Tensor:
    """mean_t exp|lp_gen - lp_prev| of each sequence, [n]: 1 when both agree."""
    error = (generation_logprobs - prev_logprobs).abs().exp()
    error = torch.nan_to_num(error, nan=torch.inf, posinf=torch.inf)
    return sequence_means(error, token_mask.float())
