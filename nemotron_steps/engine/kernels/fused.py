"""Pieces of a transformer layer with their gradients written out: elementwise ones in two or three passes, not ten, and
linears, by oneDNN where float32 on CPU with AVX-512 makes that twice as fast as torch's MKL (AMD)."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def rms_norm(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """states / rms(states) · weight over the last dimension."""
    if states.device.type == "cpu" and states.dtype is torch.float32:
        return _RmsNorm.apply(states, weight, eps)
    if weight.dim() == 1:
        return F.rms_norm(states, weight.shape, weight, eps)
    return F.rms_norm(states, weight.shape[-1:], eps=eps) * weight


def activation(kind: str) -> tuple[Callable[[Tensor], Tensor], int]:
    """What an MLP does between its products, and its rows of the first to one of the second."""
    return (swiglu, 2) if kind == "swiglu" else (squared_relu, 1)


def split_heads(mixed: Tensor, scale: Tensor | None, cos_sin: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Norm queries and keys, rotate them, part them: mixed [T, groups, heads + 2, D] of queries, key and value. scale
    [heads + 1, D] of the norm, or None. Query [T, groups · heads, D], key and value [T, groups, D]."""
    tokens, groups, slots, width = mixed.shape
    if mixed.is_cuda and width & (width - 1) == 0:
        from nemotron_steps.engine.kernels import triton_kernels

        return triton_kernels.split_heads(mixed, scale, cos_sin, eps)
    # Norm and rotation treat queries and keys alike, so they are done in one go.
    query_key, value = mixed[:, :, : slots - 1], mixed[:, :, slots - 1]
    if scale is not None:
        query_key = rms_norm(query_key, scale, eps)
    query_key = rotate(query_key, cos_sin)
    query = query_key[:, :, : slots - 2].reshape(tokens, groups * (slots - 2), width)
    return query, query_key[:, :, slots - 2], value


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, eps: float) -> Tensor:
        width = states.shape[-1]
        scale = torch.linalg.vecdot(states, states).div_(width).add_(eps).rsqrt_().unsqueeze(-1)
        ctx.save_for_backward(states, weight, scale)
        normed: Tensor = states * scale
        return normed.mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        states, weight, scale = ctx.saved_tensors
        product = grad * states
        # The mean over the normalised dimension of grad · weight · states, without another temporary.
        along = torch.linalg.vecdot(product, weight.expand_as(product)).unsqueeze(-1) * scale.pow(3) / states.shape[-1]
        grad_states = (grad * scale).mul_(weight).addcmul_(states, along, value=-1.0)
        grad_weight = product.mul_(scale).sum_to_size(weight.shape)
        return grad_states, grad_weight, None


class _SwiGlu(torch.autograd.Function):
    """silu(gate) · up, of a last dimension that holds gate, then up."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        if gate_up.is_cuda:
            from nemotron_steps.engine.kernels.triton_kernels import swiglu_forward

            gate_up = gate_up.contiguous()
            ctx.save_for_backward(gate_up)
            return swiglu_forward(gate_up.flatten(0, -2)).view(*gate_up.shape[:-1], -1)
        gate, up = gate_up.chunk(2, dim=-1)
        sigmoid = torch.sigmoid(gate)
        ctx.save_for_backward(gate_up, sigmoid)
        activated: Tensor = gate * sigmoid
        return activated.mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        gate_up, *kept = ctx.saved_tensors
        if not kept:
            from nemotron_steps.engine.kernels.triton_kernels import swiglu_backward

            grads = swiglu_backward(gate_up.flatten(0, -2), grad.contiguous().flatten(0, -2))
            return grads.view_as(gate_up)
        (sigmoid,) = kept
        gate, up = gate_up.chunk(2, dim=-1)
        result = torch.empty_like(gate_up)
        grad_gate, grad_up = result.chunk(2, dim=-1)
        torch.mul(gate, sigmoid, out=grad_up)  # silu(gate), for the moment
        # silu' = σ + silu (1 − σ)
        torch.addcmul(grad_up, grad_up, sigmoid, value=-1.0, out=grad_gate).add_(sigmoid).mul_(grad).mul_(up)
        grad_up.mul_(grad)
        return result


class _SquaredRelu(torch.autograd.Function):
    """max(0, states)²."""

    @staticmethod
    def forward(ctx: Any, states: Tensor) -> Tensor:
        if states.is_cuda:
            from nemotron_steps.engine.kernels.triton_kernels import squared_relu_forward

            states = states.contiguous()
            ctx.save_for_backward(states)
            return squared_relu_forward(states)
        positive = F.relu(states)
        ctx.save_for_backward(positive)
        return positive * positive

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (kept,) = ctx.saved_tensors
        if kept.is_cuda:
            from nemotron_steps.engine.kernels.triton_kernels import squared_relu_backward

            return squared_relu_backward(kept, grad.contiguous())
        product: Tensor = grad * kept
        return product.mul_(2.0)


class _Rotate(torch.autograd.Function):
    """Rotary embedding, rotate-half convention: states [T, …, head_dim], cos_sin [2, T, 1, 1, head_dim]."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, cos_sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos_sin)
        return turn(states, cos_sin, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (cos_sin,) = ctx.saved_tensors
        return turn(grad, cos_sin, -1.0), None


def turn(states: Tensor, cos_sin: Tensor, direction: float) -> Tensor:
    """`rotate` without gradients; direction −1 is its gradient."""
    half = states.shape[-1] // 2
    out: Tensor = states * cos_sin[0]
    sine = cos_sin[1, ..., :half]  # both halves hold the same angles
    out[..., :half].addcmul_(states[..., half:], sine, value=-direction)
    out[..., half:].addcmul_(states[..., :half], sine, value=direction)
    return out


swiglu, squared_relu, rotate = _SwiGlu.apply, _SquaredRelu.apply, _Rotate.apply


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
