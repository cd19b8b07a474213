"""Attention of flat tokens by a kernel in C (engine/native/attention.c), for float32 on CPU.

From the QKV projection to what the output projection takes, and back: QK-norm, rotary embedding and attention in one
pass over the tokens, any layout, nothing padded, no scores kept.

Shapes: T tokens, h key-value heads, R query heads for each, D head size.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int64, c_void_p
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from nemotron_steps.engine.native.compiler import library

if TYPE_CHECKING:
    from nemotron_steps.engine.policy.token_layout import TokenLayout

_TENSORS = (
    *("mixed", "norm", "cos_sin", "attended", "lse", "grad", "grad_mixed", "grad_norm"),
    *("whole", "suffix", "first_suffix"),
)
_SIZES = (
    *("wholes", "suffix_tokens", "tokens", "heads", "queries", "dim"),
    *("longest_whole", "longest_suffix"),
)


class _Attention(ctypes.Structure):
    """`Attention` of attention.c, in the order of its fields."""

    _fields_ = [*((name, c_void_p) for name in _TENSORS), *((name, c_int64) for name in _SIZES), ("eps", c_float)]


def runs_natively(states: torch.Tensor) -> bool:
    """Whether there is a kernel for the device and type of `states`."""
    return states.device.type == "cpu" and states.dtype is torch.float32 and library() is not None


def attend(
    mixed: torch.Tensor, norm: torch.Tensor | None, cos_sin: torch.Tensor, layout: TokenLayout, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of every token over its prompt and what precedes it in its row.

    Args:
        mixed: [T, h, R + 2, D], a key-value head's queries, its key, its value; contiguous.
        norm: [R + 1, D], norm weights of the queries and the key; None for models without.
        cos_sin: [2, T, 1, 1, D].
        layout: where each token belongs.
        eps: of the norm.

    Returns:
        [T, h, R · D], 0 for tokens that pad the layout; and log-sum-exps [T, h, R] for `attend_backward`.
    """
    tokens, heads, slots, dim = mixed.shape
    attended = mixed.new_empty(tokens, heads, (slots - 2) * dim)
    lse = mixed.new_empty(tokens, heads, slots - 2)
    _run(layout, eps, mixed=mixed, norm=norm, cos_sin=cos_sin, attended=attended, lse=lse)
    if layout.padding:
        attended[tokens - layout.padding :] = 0
    return attended, lse


def attend_backward(
    grad: torch.Tensor,
    mixed: torch.Tensor,
    lse: torch.Tensor,
    norm: torch.Tensor | None,
    cos_sin: torch.Tensor,
    layout: TokenLayout,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients of `mixed` and `norm`.

    Args:
        grad: [T, h, R · D], contiguous.
        lse: by `attend`, of the same other arguments.
    """
    tokens, heads, slots, dim = mixed.shape
    grad_mixed = torch.empty_like(mixed)
    grad_norm = mixed.new_empty(layout.whole.rows * heads, slots - 1, dim)
    _run(
        layout, eps,
        mixed=mixed, norm=norm, cos_sin=cos_sin, lse=lse, grad=grad, grad_mixed=grad_mixed, grad_norm=grad_norm,
    )  # fmt: skip
    if layout.padding:
        grad_mixed[tokens - layout.padding :] = 0
    return grad_mixed, None if norm is None else grad_norm.sum(0)


def native_attention(
    mixed: torch.Tensor, norm: torch.Tensor | None, cos_sin: torch.Tensor, layout: TokenLayout, eps: float
) -> torch.Tensor:
    """`attend` with gradients to `mixed` and `norm`; [T, h · R · D]."""
    attended: torch.Tensor = _NativeAttention.apply(mixed, norm, cos_sin, layout, eps)  # type: ignore[no-untyped-call]
    return attended.flatten(1)


class _NativeAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        mixed: torch.Tensor,
        norm: torch.Tensor | None,
        cos_sin: torch.Tensor,
        layout: TokenLayout,
        eps: float,
    ) -> torch.Tensor:
        attended, lse = attend(mixed, norm, cos_sin, layout, eps)
        ctx.save_for_backward(mixed, lse, norm, cos_sin)
        ctx.layout, ctx.eps = layout, eps
        return attended

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        mixed, lse, norm, cos_sin = ctx.saved_tensors
        grad_mixed, grad_norm = attend_backward(grad.contiguous(), mixed, lse, norm, cos_sin, ctx.layout, ctx.eps)
        return grad_mixed, grad_norm, None, None, None


def _run(layout: TokenLayout, eps: float, **tensors: torch.Tensor | None) -> None:
    kernels = library()
    assert kernels is not None
    kernels.attention_scratch.restype = c_int64
    spans, mixed = layout.spans, tensors["mixed"]
    assert mixed is not None
    tensors |= {
        "whole": spans.whole.cu_seqlens,
        "suffix": None if spans.suffix is None else spans.suffix.cu_seqlens,
        "first_suffix": spans.first_suffix,
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
        longest_whole=spans.whole.max_seqlen,
        longest_suffix=0 if spans.suffix is None else spans.suffix.max_seqlen,
        eps=eps,
    )
    count = torch.get_num_threads()
    scratch = torch.empty(count * kernels.attention_scratch(ctypes.byref(attention)))
    backward = tensors.get("grad") is not None
    kernels.attention(ctypes.byref(attention), c_int64(backward), c_int64(count), ctypes.c_void_p(scratch.data_ptr()))
