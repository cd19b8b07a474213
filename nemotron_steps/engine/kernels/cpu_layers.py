"""The halves of a dense transformer layer as one function each, with gradients written out, for float32 on CPU.

    attention_half    hidden + W_out attention(rotate(norm(W_q u)), rotate(norm(W_k u)), W_v u)
    feed_forward      hidden + W_down f(W_up u),  f = swiglu, or relu² where the MLP has no gate
                      u = w · rms_norm(hidden)

A tiny model on CPU spends as long on passes over memory as on products: written as one, there are 9 in place of 19.
Shapes: T tokens, H hidden, h key-value heads, R query heads for each, D head size, W width; `layout` is a TokenLayout.
"""

import ctypes
from ctypes import c_float, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemotron_steps.engine.kernels.compiler import library
from nemotron_steps.engine.kernels.fused import linear_forward, outer_product


def runs_natively(states: Tensor) -> bool:
    """Whether there are kernels in C for the device and type of `states`."""
    return states.device.type == "cpu" and states.dtype is torch.float32 and library() is not None


def feed_forward(hidden: Tensor, norm: Tensor, up: Tensor, down: Tensor, eps: float, *, gated: bool = True) -> Tensor:
    """The residual stream [..., H] after the MLP: up [(2 ·) ffn, H] (gate, then up), down [H, ffn]."""
    return _FeedForward.apply(hidden, norm, up, down, eps, gated)


def native_attention(mixed: Tensor, norm: Tensor | None, cos_sin: Tensor, layout: Any, eps: float) -> Tensor:
    """`attend` with gradients to `mixed` and `norm`; [T, h · R · D]."""
    return _NativeAttention.apply(mixed, norm, cos_sin, layout, eps).flatten(1)


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, norm: Tensor, up: Tensor, down: Tensor, eps: float, gated: bool) -> Tensor:
        unit, scale = rms_normalize(hidden.flatten(0, -2), eps)
        folded = up * norm
        inner = linear_forward(unit, folded)
        activated = swiglu(inner) if gated else inner.relu_() * inner
        ctx.gated = gated
        ctx.save_for_backward(unit, scale, inner, activated, folded, norm, up, down)
        return linear_forward(activated, down, plus=hidden.flatten(0, -2)).view_as(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_result: Tensor) -> tuple[Tensor | None, ...]:
        unit, scale, inner, activated, folded, norm, up, down = ctx.saved_tensors
        grad = grad_result.reshape(unit.shape)
        grad_down = outer_product(grad, activated)
        grad_inner = linear_forward(grad, down.t())
        grad_inner = swiglu_backward(inner, grad_inner) if ctx.gated else grad_inner.mul_(inner).mul_(2.0)
        grad_folded = outer_product(grad_inner, unit)
        grad_norm = torch.linalg.vecdot(grad_folded, up, dim=0)
        grad_hidden = rms_normalize_backward(linear_forward(grad_inner, folded.t()), unit, scale, plus=grad)
        return grad_hidden.view_as(grad_result), grad_norm, grad_folded.mul_(norm), grad_down, None, None


class _AttentionHalf(torch.autograd.Function):
    """The residual stream [T, ..., H] after attention; where `runs_natively`. qkv [h · (R + 2) · D, H]; head_norm [R +
    1, D], of queries and key; out [H, h · R · D]; cos_sin [2, T, 1, 1, D]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        norm: Tensor,
        qkv: Tensor,
        head_norm: Tensor | None,
        out: Tensor,
        cos_sin: Tensor,
        layout: Any,
        eps: float,
    ) -> Tensor:
        rows, dim = hidden.flatten(0, -2), cos_sin.shape[-1]
        key_value_heads = (qkv.shape[0] - out.shape[1]) // (2 * dim)
        unit, scale = rms_normalize(rows, eps)
        folded = qkv * norm
        mixed = linear_forward(unit, folded).view(rows.shape[0], key_value_heads, -1, dim)
        attended, lse = attend(mixed, head_norm, cos_sin, layout, eps)
        ctx.save_for_backward(unit, scale, folded, mixed, lse, attended, norm, qkv, head_norm, out, cos_sin)
        ctx.layout, ctx.eps = layout, eps
        return linear_forward(attended.flatten(1), out, plus=rows).view_as(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_result: Tensor) -> tuple[Tensor | None, ...]:
        unit, scale, folded, mixed, lse, attended, norm, qkv, head_norm, out, cos_sin = ctx.saved_tensors
        grad = grad_result.reshape(unit.shape)
        grad_out = outer_product(grad, attended.flatten(1))
        grad_attended = linear_forward(grad, out.t()).view_as(attended)
        grad_mixed, grad_head_norm = attend_backward(grad_attended, mixed, lse, head_norm, cos_sin, ctx.layout, ctx.eps)
        grad_rows = grad_mixed.flatten(1)
        grad_folded = outer_product(grad_rows, unit)
        grad_norm = torch.linalg.vecdot(grad_folded, qkv, dim=0)
        grad_hidden = rms_normalize_backward(linear_forward(grad_rows, folded.t()), unit, scale, plus=grad)
        grads = grad_norm, grad_folded.mul_(norm), grad_head_norm, grad_out
        return grad_hidden.view_as(grad_result), *grads, None, None, None


attention_half = _AttentionHalf.apply


class _NativeAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mixed: Tensor, norm: Tensor | None, cos_sin: Tensor, layout: Any, eps: float) -> Tensor:
        attended, lse = attend(mixed, norm, cos_sin, layout, eps)
        ctx.save_for_backward(mixed, lse, norm, cos_sin)
        ctx.layout, ctx.eps = layout, eps
        return attended

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        mixed, lse, norm, cos_sin = ctx.saved_tensors
        grad_mixed, grad_norm = attend_backward(grad.contiguous(), mixed, lse, norm, cos_sin, ctx.layout, ctx.eps)
        return grad_mixed, grad_norm, None, None, None


def _kernels() -> Any:
    kernels = library()
    assert kernels is not None  # `runs_natively`
    return kernels


def rms_normalize(states: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """[T, W] → states / rms over the last dimension, and 1 / rms [T, 1]."""
    states = states.contiguous()
    unit, scale = torch.empty_like(states), states.new_empty(states.shape[0], 1)
    _kernels().norm_forward(_at(states), _at(unit), _at(scale), *_sizes(states), c_float(eps), _threads())
    return unit, scale


def rms_normalize_backward(grad: Tensor, unit: Tensor, scale: Tensor, plus: Tensor) -> Tensor:
    """Gradient of the states from that of the unit rows (overwritten), and `plus`."""
    plus = plus.contiguous()  # what autograd hands on may be one number, expanded
    _kernels().norm_backward(_at(grad), _at(unit), _at(scale), _at(plus), *_sizes(grad), _threads())
    return grad


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) · up [T, W], of [T, 2 · W] that holds gate, then up."""
    activated = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    _kernels().swiglu_forward(_at(gate_up), _at(activated), *_sizes(activated), _threads())
    return activated


def swiglu_backward(gate_up: Tensor, grad: Tensor) -> Tensor:
    """Gradient of gate_up from that of the activated, which may be overwritten."""
    result = torch.empty_like(gate_up)
    _kernels().swiglu_backward(_at(gate_up), _at(grad), _at(result), *_sizes(grad), _threads())
    return result


def _at(tensor: Tensor) -> c_void_p:
    assert tensor.is_contiguous() and tensor.dtype is torch.float32
    return c_void_p(tensor.data_ptr())


def _sizes(tensor: Tensor) -> tuple[c_int64, c_int64]:
    return c_int64(tensor.shape[0]), c_int64(tensor.shape[1])


def _threads() -> c_int64:
    return c_int64(torch.get_num_threads())


def attend(mixed: Tensor, norm: Tensor | None, cos_sin: Tensor, layout: Any, eps: float) -> tuple[Tensor, Tensor]:
    """mixed [T, h, R + 2, D] → attended [T, h, R · D], and log-sum-exps [T, h, R]."""
    tokens, heads, slots, dim = mixed.shape
    attended = mixed.new_empty(tokens, heads, (slots - 2) * dim)
    lse = mixed.new_empty(tokens, heads, slots - 2)
    _run(layout, eps, mixed, norm=norm, cos_sin=cos_sin, attended=attended, lse=lse)
    if layout.padding:
        attended[tokens - layout.padding :] = 0
    return attended, lse


def attend_backward(
    grad: Tensor, mixed: Tensor, lse: Tensor, norm: Tensor | None, cos_sin: Tensor, layout: Any, eps: float
) -> tuple[Tensor, Tensor | None]:
    """Gradients of `mixed` and `norm` from that of the output, [T, h, R · D], contiguous."""
    tokens, heads, slots, dim = mixed.shape
    grad_mixed = torch.empty_like(mixed)
    grad_norm = mixed.new_empty(layout.whole.rows * heads, slots - 1, dim)
    grads = {"grad": grad, "grad_mixed": grad_mixed, "grad_norm": grad_norm}
    _run(layout, eps, mixed, norm=norm, cos_sin=cos_sin, lse=lse, **grads)
    if layout.padding:
        grad_mixed[tokens - layout.padding :] = 0
    return grad_mixed, None if norm is None else grad_norm.sum(0)


class _Attention(ctypes.Structure):
    """`Attention` of attention.c, in the order of its fields."""

    _TENSORS = (
        *("mixed", "norm", "cos_sin", "attended", "lse", "grad", "grad_mixed", "grad_norm"),
        *("whole", "suffix", "first_suffix"),
    )
    _SIZES = (*("wholes", "suffix_tokens", "tokens", "heads", "queries", "dim"), *("longest_whole", "longest_suffix"))
    _fields_ = [*((name, c_void_p) for name in _TENSORS), *((name, c_int64) for name in _SIZES), ("eps", c_float)]


def _run(layout: Any, eps: float, mixed: Tensor, **tensors: Tensor | None) -> None:
    kernels = _kernels()
    kernels.attention_scratch.restype = c_int64
    tensors |= {
        "mixed": mixed,
        "whole": layout.whole.cu_seqlens,
        "suffix": None if layout.suffix is None else layout.suffix.cu_seqlens,
        "first_suffix": layout.first_suffix,
    }
    assert all(tensor is None or tensor.is_contiguous() for tensor in tensors.values())
    attention = _Attention(
        **{name: None if tensor is None else tensor.data_ptr() for name, tensor in tensors.items()},
        wholes=layout.whole.rows,
        suffix_tokens=layout.whole_tokens,
        tokens=mixed.shape[0],
        heads=mixed.shape[1],
        queries=mixed.shape[2] - 2,
        dim=mixed.shape[3],
        longest_whole=layout.whole.width,
        longest_suffix=0 if layout.suffix is None else layout.suffix.width,
        eps=eps,
    )
    count = torch.get_num_threads()
    scratch = torch.empty(count * kernels.attention_scratch(ctypes.byref(attention)))
    backward = tensors.get("grad") is not None
    kernels.attention(ctypes.byref(attention), c_int64(backward), c_int64(count), c_void_p(scratch.data_ptr()))
