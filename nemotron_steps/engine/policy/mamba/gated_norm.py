"""RMSNorm of groups of channels, of what a gate lets through: what stands between a Mamba-2 scan and its output.

    u = y · silu(gate),   norm = u / sqrt(mean over the group of u² + eps) · weight

in float32 whatever the precision, with its gradient written out: it keeps its inputs and one number a group.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from nemotron_steps.engine.policy.mamba.libraries import norm_for


def gated_norm(y: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, groups: int, eps: float) -> torch.Tensor:
    """Gate, then norm each group.

    Args:
        y, gate: [T, W].
        weight: [W].
        groups: that the W channels are cut into, evenly.
        eps: added to the mean square.

    Returns:
        [T, W], as y.
    """
    return (norm_for(y, groups, _plain) or _plain)(y, gate, weight, groups, eps)


def _plain(y: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, groups: int, eps: float) -> torch.Tensor:
    normed: torch.Tensor = _GatedNorm.apply(y, gate, weight, groups, eps)  # type: ignore[no-untyped-call]
    return normed


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, y: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, groups: int, eps: float
    ) -> torch.Tensor:
        opened = (y.float() * F.silu(gate.float())).view(-1, groups, y.shape[1] // groups)
        scale = torch.linalg.vecdot(opened, opened).div_(opened.shape[-1]).add_(eps).rsqrt_().unsqueeze(-1)
        ctx.save_for_backward(y, gate, weight, scale)
        return (opened.mul_(scale).flatten(1) * weight.float()).to(y.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        y, gate, weight, scale = ctx.saved_tensors
        shape = (*scale.shape[:2], -1)
        values, gate32, grad = y.float(), gate.float(), grad.float()
        opened = F.silu(gate32)
        unit = (values * opened).view(shape).mul_(scale)
        grad_weight = (grad * unit.flatten(1)).sum(0)
        grads = (grad * weight.float()).view(shape)
        along = torch.linalg.vecdot(grads, unit).div_(unit.shape[-1]).unsqueeze(-1)
        grads = grads.addcmul_(unit, along, value=-1.0).mul_(scale).flatten(1)
        grad_gate = torch.ops.aten.silu_backward(grads * values, gate32)
        return grads.mul_(opened).to(y.dtype), grad_gate.to(gate.dtype), grad_weight.to(weight.dtype), None, None
