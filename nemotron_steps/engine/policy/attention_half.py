"""The first half of a dense transformer layer as one function with its gradient written out, for float32 on CPU.

    result = hidden + W_out attention(rotate(norm(W_q u)), rotate(norm(W_k u)), W_v u),  u = w · rms_norm(hidden)

As feed_forward.py does for the second half, and for the same reason. Only for layouts that are families
(family_attention.py) and models that norm queries and keys, without biases; attention.py has the general one.

Shapes: T tokens, H hidden, h key-value heads, R query heads for each, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from nemotron_steps.engine.dense import outer_product, product
from nemotron_steps.engine.policy.family_attention import Families, attend, attend_backward
from nemotron_steps.engine.policy.fused import turn


def attention_half(
    hidden: torch.Tensor,
    norm_weight: torch.Tensor,
    qkv_weight: torch.Tensor,
    head_norm: torch.Tensor,
    out_weight: torch.Tensor,
    cos_sin: torch.Tensor,
    families: Families,
    eps: float,
) -> torch.Tensor:
    """The residual stream after attention.

    Args:
        hidden: [T, ..., H].
        norm_weight: [H].
        qkv_weight: [h · (R + 2) · D, H]; of each key-value head its queries, its key, its value.
        head_norm: [R + 1, D], norm weights of a key-value head's queries and key.
        out_weight: [H, h · R · D].
        cos_sin: [2, T, 1, 1, D].
        families: the layout.
        eps: of both norms.

    Returns:
        As hidden.
    """
    result: torch.Tensor = _AttentionHalf.apply(  # type: ignore[no-untyped-call]
        hidden, norm_weight, qkv_weight, head_norm, out_weight, cos_sin, families, eps
    )
    return result


class _AttentionHalf(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: torch.Tensor,
        norm_weight: torch.Tensor,
        qkv_weight: torch.Tensor,
        head_norm: torch.Tensor,
        out_weight: torch.Tensor,
        cos_sin: torch.Tensor,
        families: Families,
        eps: float,
    ) -> torch.Tensor:
        rows = hidden.flatten(0, -2)
        tokens, slots = rows.shape[0], head_norm.shape[0]
        scale = inverse_rms(rows, eps)
        unit = rows * scale
        folded = qkv_weight * norm_weight
        mixed = product(unit, folded).view(tokens, families.kv_heads, slots + 1, -1)
        query_key, value = mixed[:, :, :slots], mixed[:, :, slots]
        head_scale = inverse_rms(query_key, eps)
        heads = query_key * head_scale
        rotated = turn(heads * head_norm, cos_sin, 1.0)
        query, key = rotated[:, :, : slots - 1].flatten(2), rotated[:, :, slots - 1]
        attended, saved = attend(query, key, value, families)
        ctx.save_for_backward(
            *(unit, scale, folded, heads, head_scale, attended, norm_weight, qkv_weight, head_norm, out_weight),
            *(cos_sin, *saved),
        )
        ctx.families = families
        return product(attended.flatten(1), out_weight, plus=rows).view_as(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_result: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        unit, scale, folded, heads, head_scale, attended, norm_weight, qkv_weight, head_norm, out_weight, *rest = (
            ctx.saved_tensors
        )
        cos_sin, *saved = rest
        slots = head_norm.shape[0]
        grad = grad_result.reshape(unit.shape)
        grad_out = outer_product(grad, attended.flatten(1))
        grad_attended = product(grad, out_weight.t()).view_as(attended)
        grad_heads = torch.empty_like(heads)
        grad_mixed = unit.new_empty(*heads.shape[:2], slots + 1, heads.shape[3])
        attend_backward(
            grad_attended,
            tuple(saved),
            ctx.families,
            grad_heads[:, :, : slots - 1].flatten(2),
            grad_heads[:, :, slots - 1],
            grad_mixed[:, :, slots],
        )
        grad_heads = turn(grad_heads, cos_sin, -1.0)
        grad_head_norm = (grad_heads * heads).sum((0, 1))
        grad_heads.mul_(head_norm)
        _norm_backward(grad_heads, heads, head_scale, out=grad_mixed[:, :, :slots])
        grad_rows = grad_mixed.flatten(1)
        grad_folded = outer_product(grad_rows, unit)
        grad_norm = torch.linalg.vecdot(grad_folded, qkv_weight, dim=0)
        grad_unit = product(grad_rows, folded.t())
        grad_hidden = _norm_backward(grad_unit, unit, scale, out=grad_unit).add_(grad).view_as(grad_result)
        return grad_hidden, grad_norm, grad_folded.mul_(norm_weight), grad_head_norm, grad_out, None, None, None


def inverse_rms(states: torch.Tensor, eps: float) -> torch.Tensor:
    """1 / rms over the last dimension, which is kept."""
    inverse: torch.Tensor = torch.linalg.vecdot(states, states).div_(states.shape[-1]).add_(eps).rsqrt_()
    return inverse.unsqueeze(-1)


def _norm_backward(grad: torch.Tensor, unit: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Gradient of the states, from that of unit = states · scale; overwrites `grad`."""
    along = torch.linalg.vecdot(grad, unit).div_(-unit.shape[-1]).unsqueeze(-1)
    return torch.mul(grad.addcmul_(unit, along), scale, out=out)
