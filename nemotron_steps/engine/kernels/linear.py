"""Linear layers by oneDNN, where float32 on CPU with AVX-512 makes that twice as fast as torch's MKL (AMD)."""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def linear(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """states Wᵀ + bias, with gradients."""
    if states.is_cuda and torch.is_grad_enabled() and getattr(weight, "main_grad", None) is not None:
        return _MainGradLinear.apply(states, weight, bias)
    if not _by_onednn(states):
        return F.linear(states, weight, bias)
    return _Linear.apply(states, weight, bias)


def linear_forward(states: Tensor, weight: Tensor, plus: Tensor | None = None) -> Tensor:
    """states Wᵀ (+ plus), without gradients; with `plus` [rows, out], states are [rows, in]."""
    if not _by_onednn(states):
        return F.linear(states, weight) if plus is None else torch.addmm(plus, states, weight.t())
    if plus is None:
        return _onednn(states, weight)
    return torch.ops.mkldnn._linear_pointwise.binary(states, plus, weight, None, "add")


def outer_product(left: Tensor, right: Tensor) -> Tensor:
    """leftᵀ right, of [T, m] and [T, n]: the gradient of a weight."""
    if not _by_onednn(left):
        return left.t() @ right
    # The operator copies its first operand when that is transposed, so the smaller one goes first.
    if left.shape[1] <= right.shape[1]:
        return _onednn(left.t(), right.t())
    return _onednn(right.t(), left.t()).t()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(states, weight)
        return _onednn(states, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        states, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        for_states, for_weight, for_bias = ctx.needs_input_grad
        return (
            _onednn(grad, weight.t()) if for_states else None,
            outer_product(rows, states.reshape(-1, states.shape[-1])) if for_weight else None,
            rows.sum(0) if for_bias else None,
        )


class _MainGradLinear(torch.autograd.Function):
    """The weight's gradient goes into its float32 `main_grad`."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(states, weight)
        ctx.main_grad = weight.main_grad  # type: ignore[attr-defined]
        return F.linear(states, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        states, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        for_states, _, for_bias = ctx.needs_input_grad
        columns = states.reshape(-1, states.shape[-1])
        torch.addmm(ctx.main_grad, rows.t(), columns, out_dtype=torch.float32, out=ctx.main_grad)
        return grad @ weight if for_states else None, None, rows.sum(0) if for_bias else None


@cache
def _has_onednn() -> bool:
    # The operator is private to torch: a version without it computes the same by torch's own products.
    available: bool = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return available and torch.backends.cpu.get_cpu_capability() == "AVX512"


def row_multiple(device: torch.device, dtype: torch.dtype) -> int:
    """What to round numbers of rows to: oneDNN generates code for every shape."""
    return 64 if uses_onednn(device, dtype) else 1


def uses_onednn(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `product` and `linear` call oneDNN."""
    return device.type == "cpu" and dtype is torch.float32 and _has_onednn()


def _by_onednn(states: Tensor) -> bool:
    return bool(states.shape[0]) and uses_onednn(states.device, states.dtype)


def _onednn(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(states, weight, bias, "none", [], "")
