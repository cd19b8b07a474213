"""The first half of a dense transformer layer as one function with its gradient written out, for float32 on CPU.

    result = hidden + W_out attention(rotate(norm(W_q u)), rotate(norm(W_k u)), W_v u),  u = w · rms_norm(hidden)

As feed_forward.py does for the second half, and for the same reason. Where attention has no kernel of its own
(native_attention.py), and for models with biases, attention.py has the general one.

Shapes: T tokens, H hidden, h key-value heads, R query heads for each, D head size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from nemotron_steps.engine.policy.kernels.cpu_norm_swiglu import rms_normalize, rms_normalize_backward
from nemotron_steps.engine.policy.kernels.dense import linear_forward, outer_product
from nemotron_steps.engine.policy.kernels.native_attention import attend, attend_backward

if TYPE_CHECKING:
    from nemotron_steps.engine.policy.token_layout import TokenLayout


def attention_half(
    hidden: torch.Tensor,
    norm_weight: torch.Tensor,
    qkv_weight: torch.Tensor,
    head_norm: torch.Tensor | None,
    out_weight: torch.Tensor,
    cos_sin: torch.Tensor,
    layout: TokenLayout,
    eps: float,
) -> torch.Tensor:
    """The residual stream after attention.

    Args:
        hidden: [T, ..., H].
        norm_weight: [H].
        qkv_weight: [h · (R + 2) · D, H]; of each key-value head its queries, its key, its value.
        head_norm: [R + 1, D], norm weights of a key-value head's queries and key; None for models without.
        out_weight: [H, h · R · D].
        cos_sin: [2, T, 1, 1, D].
        layout: where each token belongs.
        eps: of both norms.

    Returns:
        As hidden.
    """
    keys_and_values = qkv_weight.shape[0] - out_weight.shape[1]
    groups = keys_and_values // (2 * cos_sin.shape[-1])
    result: torch.Tensor = _AttentionHalf.apply(  # type: ignore[no-untyped-call]
        hidden, norm_weight, qkv_weight, head_norm, out_weight, cos_sin, layout, groups, eps
    )
    return result


class _AttentionHalf(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: torch.Tensor,
        norm_weight: torch.Tensor,
        qkv_weight: torch.Tensor,
        head_norm: torch.Tensor | None,
        out_weight: torch.Tensor,
        cos_sin: torch.Tensor,
        layout: TokenLayout,
        groups: int,
        eps: float,
    ) -> torch.Tensor:
        rows = hidden.flatten(0, -2)
        unit, scale = rms_normalize(rows, eps)
        folded = qkv_weight * norm_weight
        mixed = linear_forward(unit, folded).view(rows.shape[0], groups, -1, cos_sin.shape[-1])
        attended, lse = attend(mixed, head_norm, cos_sin, layout, eps)
        ctx.save_for_backward(
            unit, scale, folded, mixed, lse, attended, norm_weight, qkv_weight, head_norm, out_weight, cos_sin
        )
        ctx.layout, ctx.eps = layout, eps
        return linear_forward(attended.flatten(1), out_weight, plus=rows).view_as(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_result: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        unit, scale, folded, mixed, lse, attended, norm_weight, qkv_weight, head_norm, out_weight, cos_sin = (
            ctx.saved_tensors
        )
        grad = grad_result.reshape(unit.shape)
        grad_out = outer_product(grad, attended.flatten(1))
        grad_attended = linear_forward(grad, out_weight.t()).view_as(attended)
        grad_mixed, grad_head_norm = attend_backward(grad_attended, mixed, lse, head_norm, cos_sin, ctx.layout, ctx.eps)
        grad_rows = grad_mixed.flatten(1)
        grad_folded = outer_product(grad_rows, unit)
        grad_norm = torch.linalg.vecdot(grad_folded, qkv_weight, dim=0)
        grad_hidden = rms_normalize_backward(linear_forward(grad_rows, folded.t()), unit, scale, plus=grad)
        grads = grad_norm, grad_folded.mul_(norm_weight), grad_head_norm, grad_out
        return grad_hidden.view_as(grad_result), *grads, None, None, None, None
