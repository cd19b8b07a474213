"""The mixer between its two projections by a kernel in C (engine/native/mamba.c), for float32 on CPU.

Convolution, scan, gate and norm in one pass over the tokens and one back, any rows, nothing padded, nothing kept for
the gradient but the projection. What torch does of the same in forty operators that each read and write memory.

Shapes: T tokens, H heads of P, G groups, N state, K kernel, C = H · P + 2 · G · N channels.
"""

from __future__ import annotations

import ctypes
import math
from ctypes import c_float, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from nemotron_steps.engine.native.compiler import library
from nemotron_steps.engine.policy.mamba.runs import Runs

_TENSORS = (
    *("mixed", "taps", "bias", "dt_bias", "a", "d", "norm", "out", "grad", "grad_mixed", "shares"),
    *("starts", "first_child"),
)
_SIZES = ("roots", "heads", "head_dim", "groups", "state", "kernel", "most_tokens", "most_rows", "stride")


class _Mamba(ctypes.Structure):
    """`Mamba` of mamba.c, in the order of its fields."""

    _fields_ = [
        *((name, c_void_p) for name in _TENSORS),
        *((name, c_int64) for name in _SIZES),
        *((name, c_float) for name in ("eps", "least", "most")),
    ]


@dataclass(frozen=True)
class Sizes:
    """Of a mixer's share on this rank."""

    heads: int
    head_dim: int
    groups: int
    state: int
    time_step_limit: tuple[float, float]
    eps: float


def runs_natively(states: torch.Tensor) -> bool:
    """Whether there is a kernel for the device and type of `states`."""
    return states.device.type == "cpu" and states.dtype is torch.float32 and library() is not None


def native_mix(
    mixed: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dt_bias: torch.Tensor,
    a: torch.Tensor,
    d: torch.Tensor,
    norm: torch.Tensor,
    runs: Runs,
    sizes: Sizes,
) -> torch.Tensor:
    """From the input projection to what the output projection takes.

    Args:
        mixed: [T, 2 · H · P + 2 · G · N + H], z, x, B, C, dt of each token.
        weight, bias: [C, 1, K] and [C], of the convolution.
        dt_bias, a, d: [H]; a is negative.
        norm: [H · P]
        runs: the rows.
        sizes: of the mixer.

    Returns:
        [T, H · P], 0 for tokens that belong to no row.
    """
    out: torch.Tensor = _Mix.apply(  # type: ignore[no-untyped-call]
        mixed, weight, bias, dt_bias, a, d, norm, runs, sizes
    )
    return out


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> torch.Tensor:  # type: ignore[override]
        *tensors, runs, sizes = given
        ctx.save_for_backward(*tensors)
        ctx.runs, ctx.sizes = runs, sizes
        mixed, norm = tensors[0], tensors[6]
        out: torch.Tensor = mixed.new_empty(mixed.shape[0], norm.shape[0])
        out[runs.tokens :] = 0
        _run(tensors, runs, sizes, out=out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        tensors, runs, sizes = ctx.saved_tensors, ctx.runs, ctx.sizes
        mixed, weight, bias, _, a, _, norm = tensors
        channels, kernel, heads = weight.shape[0], weight.shape[2], a.shape[0]
        parts = [kernel * channels, channels, heads, heads, heads, norm.shape[0]]
        shares = mixed.new_zeros(runs.roots, sum(parts))
        grad_mixed = torch.empty_like(mixed)
        grad_mixed[runs.tokens :] = 0
        _run(tensors, runs, sizes, grad=grad.contiguous(), grad_mixed=grad_mixed, shares=shares)
        taps, *rest = torch.split(shares.sum(0), parts)
        if bias is None:
            rest[0] = None  # type: ignore[call-overload]
        return grad_mixed, taps.view(kernel, channels).t().contiguous().view_as(weight), *rest, None, None


def _run(given: Any, runs: Runs, sizes: Sizes, **results: torch.Tensor) -> None:
    kernels = library()
    assert kernels is not None
    kernels.mamba_scratch.restype = c_int64
    mixed, weight, bias, dt_bias, a, d, norm = given
    families = runs.families
    tensors: dict[str, torch.Tensor | None] = {
        "mixed": mixed.contiguous(),
        "taps": weight[:, 0].t().contiguous(),
        "bias": bias,
        "dt_bias": dt_bias,
        "a": a,
        "d": d,
        "norm": norm,
        "starts": families.starts,
        "first_child": families.first_child,
        **results,
    }
    assert all(tensor is None or tensor.is_contiguous() for tensor in tensors.values())
    least, most = sizes.time_step_limit
    mamba = _Mamba(
        **{name: None if tensor is None else tensor.data_ptr() for name, tensor in tensors.items()},
        roots=runs.roots,
        heads=sizes.heads,
        head_dim=sizes.head_dim,
        groups=sizes.groups,
        state=sizes.state,
        kernel=weight.shape[2],
        most_tokens=families.most_tokens,
        most_rows=families.most_rows,
        # The states kept are about as many as those computed again from one of them.
        stride=max(16, math.isqrt(int(runs.lengths.max()))),
        eps=sizes.eps,
        least=least,
        most=most,
    )
    count = min(torch.get_num_threads(), runs.roots * sizes.groups)
    scratch = torch.empty(count * kernels.mamba_scratch(ctypes.byref(mamba)))
    backward = "grad" in results
    kernels.mamba(ctypes.byref(mamba), c_int64(backward), c_int64(count), c_void_p(scratch.data_ptr()))
