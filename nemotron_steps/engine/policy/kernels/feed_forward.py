"""The second half of a dense transformer layer as one function with its gradient written out, for float32 on CPU.

    result = hidden + W_down swiglu(W_up (w · rms_norm(hidden)))

A tiny model on CPU spends as long on passes over memory as on products. Written as one, the norm's weight goes into
W_up, which is smaller than the states, the residual is added by the product, and its gradient needs no pass of its own:
9 passes over states of the widths hidden and ffn in place of 19. On CUDA see triton_kernels.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from nemotron_steps.engine.policy.kernels.cpu_norm_swiglu import (
    rms_normalize,
    rms_normalize_backward,
    swiglu,
    swiglu_backward,
)
from nemotron_steps.engine.policy.kernels.dense import linear_forward, outer_product


def feed_forward(
    hidden: torch.Tensor,
    norm_weight: torch.Tensor,
    up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """The residual stream after the MLP.

    Args:
        hidden: [..., hidden], the residual stream.
        norm_weight: [hidden].
        up_weight: [2 · ffn, hidden], gate, then up.
        down_weight: [hidden, ffn].
        eps: of the norm.

    Returns:
        [..., hidden].
    """
    result: torch.Tensor = _FeedForward.apply(hidden, norm_weight, up_weight, down_weight, eps)  # type: ignore[no-untyped-call]
    return result


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: torch.Tensor,
        norm_weight: torch.Tensor,
        up_weight: torch.Tensor,
        down_weight: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        unit, scale = rms_normalize(hidden.flatten(0, -2), eps)
        folded = up_weight * norm_weight
        gate_up = linear_forward(unit, folded)
        activated = swiglu(gate_up)
        ctx.save_for_backward(unit, scale, gate_up, activated, folded, norm_weight, up_weight, down_weight)
        return linear_forward(activated, down_weight, plus=hidden.flatten(0, -2)).view_as(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_result: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        unit, scale, gate_up, activated, folded, norm_weight, up_weight, down_weight = ctx.saved_tensors
        grad = grad_result.reshape(unit.shape)
        grad_down = outer_product(grad, activated)
        grad_gate_up = swiglu_backward(gate_up, linear_forward(grad, down_weight.t()))
        grad_folded = outer_product(grad_gate_up, unit)
        grad_norm = torch.linalg.vecdot(grad_folded, up_weight, dim=0)
        grad_hidden = rms_normalize_backward(linear_forward(grad_gate_up, folded.t()), unit, scale, plus=grad)
        return grad_hidden.view_as(grad_result), grad_norm, grad_folded.mul_(norm_weight), grad_down, None
