"""Causal depthwise convolution over flat tokens, with SiLU: every token sees itself and the few before it in its row.

A suffix sees the last tokens of its shared prompt; other rows see nothing before their first token, or a window that
is given. Shapes: T tokens, C channels, kernel K.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from nemotron_steps.engine.policy.cells import unpad
from nemotron_steps.engine.policy.mamba.libraries import conv_for
from nemotron_steps.engine.policy.mamba.runs import Runs


def conv(
    states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    runs: Runs,
    window: torch.Tensor | None = None,
) -> torch.Tensor:
    """silu(bias + Σ_k weight[k] · states[t − K + 1 + k]).

    Args:
        states: [T, C].
        weight: [C, 1, K].
        bias: [C].
        runs: the rows. Tokens after them get 0.
        window: [runs.roots, C, K − 1], what precedes the rows that continue no other, the newest last.

    Returns:
        [T, C].
    """
    taps = weight.shape[2] - 1
    gaps = runs.gaps(taps)
    spread: torch.Tensor = _Spread.apply(states, window, runs, taps)  # type: ignore[no-untyped-call]
    by_library = conv_for(states, weight.shape[2], _plain)
    out = unpad((by_library or _plain)(spread, weight, bias), gaps.cells)
    return F.pad(out, (0, 0, 0, runs.padding)) if runs.padding else out


def last_window(states: torch.Tensor, runs: Runs, kernel: int, window: torch.Tensor | None = None) -> torch.Tensor:
    """The windows after each row's last token, [rows, C, K − 1]; arguments as of `conv`, whose inputs these are."""
    gaps = runs.gaps(kernel - 1)
    last = _with_gaps(states, window, runs, kernel - 1)[gaps.last.flatten()]
    return last.view(-1, kernel - 1, states.shape[1]).transpose(1, 2)


def _with_gaps(states: torch.Tensor, window: torch.Tensor | None, runs: Runs, taps: int) -> torch.Tensor:
    """[tokens + rows · taps, C]: before each row what precedes it."""
    gaps = runs.gaps(taps)
    spread = states.index_select(0, gaps.source)
    if window is None:
        return spread.index_fill_(0, gaps.empty_cells, 0)
    given = window.transpose(1, 2).reshape(-1, states.shape[1]).index_select(0, gaps.window)
    return spread.index_copy_(0, gaps.empty_cells, given.to(spread.dtype))


class _Spread(torch.autograd.Function):
    """`_with_gaps`; gathers both ways, where no prompt is shared."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, states: torch.Tensor, window: torch.Tensor | None, runs: Runs, taps: int
    ) -> torch.Tensor:
        ctx.runs, ctx.taps = runs, taps
        ctx.window = None if window is None else (window.shape, window.dtype)
        return _with_gaps(states, window, runs, taps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        runs: Runs = ctx.runs
        gaps = runs.gaps(ctx.taps)
        grad_states = grad.index_select(0, gaps.cells)
        if gaps.prompt.numel():
            grad_states.index_add_(0, gaps.prompt, grad.index_select(0, gaps.prompt_cells))
        if runs.padding:
            grad_states = F.pad(grad_states, (0, 0, 0, runs.padding))
        grad_window = None
        if ctx.needs_input_grad[1]:
            shape, dtype = ctx.window
            flat = grad.new_zeros(shape[0] * ctx.taps, shape[1])
            flat.index_add_(0, gaps.window, grad.index_select(0, gaps.empty_cells))
            grad_window = flat.view(-1, ctx.taps, shape[1]).transpose(1, 2).to(dtype)
        return grad_states, grad_window, None, None


def _plain(spread: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """silu of the convolution of one run of cells before which nothing is, [cells, C]."""
    out: torch.Tensor = _Conv.apply(spread, weight, bias)  # type: ignore[no-untyped-call]
    return out


def _before_silu(spread: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """float32 [cells, C]"""
    kernel, taps = weight.shape[2], weight[:, 0].float().t()
    spread = spread.float()
    summed = spread * taps[-1] if bias is None else torch.addcmul(bias.float(), spread, taps[-1])
    for back in range(1, kernel):
        summed[back:].addcmul_(spread[:-back], taps[-1 - back])
    return summed


class _Conv(torch.autograd.Function):
    """Keeps its inputs alone."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, spread: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(spread, weight, bias)
        return F.silu(_before_silu(spread, weight, bias), inplace=True).to(spread.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        spread, weight, bias = ctx.saved_tensors
        grad = _silu_backward(grad.float(), _before_silu(spread, weight, bias))
        kernel, taps, exact = weight.shape[2], weight[:, 0].float().t(), spread.float()
        into = grad * taps[-1]
        grad_taps = [torch.linalg.vecdot(grad, exact, dim=0)]
        for back in range(1, min(kernel, len(grad))):
            into[:-back].addcmul_(grad[back:], taps[-1 - back])
            grad_taps.append(torch.linalg.vecdot(grad[back:], exact[:-back], dim=0))
        grad_taps += [torch.zeros_like(grad_taps[0])] * (kernel - len(grad_taps))
        grad_weight = torch.stack(grad_taps[::-1], 1)[:, None].to(weight.dtype)
        return into.to(spread.dtype), grad_weight, None if bias is None else grad.sum(0).to(bias.dtype)


def _silu_backward(grad: torch.Tensor, summed: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = torch.ops.aten.silu_backward(grad, summed)
    return result
