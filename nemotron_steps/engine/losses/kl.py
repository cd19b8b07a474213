"""Estimators of the KL divergence between two policies from the logprobs of sampled tokens.

Source: J. Schulman, "Approximating KL Divergence" (2020). With x ~ p and log r = log q(x) - log p(x), the
expectation of each estimator is KL(p || q) (k2 only to second order): k1 is unbiased with high variance and may be
negative, k2 is biased with low variance, k3 is unbiased, never negative and low in variance.
"""

from __future__ import annotations

from typing import Literal

import torch

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
    """Per-token KL(policy || reference), times `weights` where they are given.

    log r = clamp(lp_ref - lp, +-input_clamp); k1 = -log r; k2 = (log r)^2 / 2; k3 = exp(log r) - 1 - log r. Then the
    weights are multiplied in, and the product is clamped to +-output_clamp.

    Args:
        logprobs: logprobs of the sampled tokens under the policy, any shape.
        reference_logprobs: the same tokens under the reference, same shape.
        kind: which estimator.
        input_clamp: bound of |log r|; None for none.
        output_clamp: bound of the result's size; None for none.
        weights: of each token, same shape. A token whose log ratio is clamped has its weight detached, or the weight's
            gradient would go on pushing where the clamp means to stop.

    Returns:
        Nats per token, same shape. Differentiable in all arguments; a clamped element has gradient 0.
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
    elif kind == "k3":
        # expm1 keeps the digits that exp(x) - 1 loses near x = 0, where trained policies live.
        divergence = torch.expm1(log_ratio) - log_ratio
    else:
        raise ValueError(f"unknown KL type {kind!r}; expected k1, k2 or k3")
    if weights is not None:
        divergence = weights * divergence
    if output_clamp is not None:
        divergence = divergence.clamp(-output_clamp, output_clamp)
    return divergence
