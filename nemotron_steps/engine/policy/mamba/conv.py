"""Causal depthwise convolution over flat tokens, with SiLU: every token sees itself and the few before it in its row.

A suffix sees the last tokens of its shared prompt; other rows see nothing before their first token, or a window that
is given. Shapes: T tokens, C channels, kernel K.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

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
    convolved: torch.Tensor = _Conv.apply(states, weight, bias, window, runs)  # type: ignore[no-untyped-call]
    return convolved


def last_window(states: torch.Tensor, runs: Runs, kernel: int, window: torch.Tensor | None = None) -> torch.Tensor:
    """The windows after each row's last token, [rows, C, K − 1]; arguments as of `conv`, whose inputs these are."""
    gaps = runs.gaps(kernel - 1)
    last = _with_gaps(states, window, runs, kernel - 1)[gaps.last.flatten()]
    return last.view(-1, kernel - 1, states.shape[1]).transpose(1, 2)


def step(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, window: torch.Tensor) -> torch.Tensor:
    """One token of every row; moves `window` on in place.

    Args:
        states: [rows, C].
        weight, bias: as of `conv`.
        window: [rows, C, K − 1].

    Returns:
        [rows, C].
    """
    seen = torch.cat((window, states[..., None].to(window.dtype)), dim=2)
    window.copy_(seen[..., 1:])
    summed = torch.linalg.vecdot(seen.float(), weight[:, 0].float())
    return F.silu(summed if bias is None else summed + bias.float()).to(states.dtype)


def _with_gaps(states: torch.Tensor, window: torch.Tensor | None, runs: Runs, taps: int) -> torch.Tensor:
    """[tokens + rows · taps, C]: before each row what precedes it."""
    gaps = runs.gaps(taps)
    spread = states.index_select(0, gaps.source)
    if window is None:
        return spread.index_fill_(0, gaps.empty_cells, 0)
    given = window.transpose(1, 2).reshape(-1, states.shape[1]).index_select(0, gaps.window)
    return spread.index_copy_(0, gaps.empty_cells, given.to(spread.dtype))


def _before_silu(spread: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """float32 [cells − K + 1, C]: of every cell that has K − 1 before it."""
    kernel = weight.shape[2]
    count = spread.shape[0] - kernel + 1
    taps = weight[:, 0].float().t()
    summed = spread[:count] * taps[0] if bias is None else torch.addcmul(bias.float(), spread[:count], taps[0])
    for k in range(1, kernel):
        summed.addcmul_(spread[k : k + count], taps[k])
    return summed


class _Conv(torch.autograd.Function):
    """Keeps its inputs alone."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        window: torch.Tensor | None,
        runs: Runs,
    ) -> torch.Tensor:
        taps = weight.shape[2] - 1
        ctx.save_for_backward(states, weight, bias, window)
        ctx.runs = runs
        summed = _before_silu(_with_gaps(states, window, runs, taps).float(), weight, bias)
        out = F.silu(summed, inplace=True).index_select(0, runs.gaps(taps).cells - taps).to(states.dtype)
        return F.pad(out, (0, 0, 0, runs.padding)) if runs.padding else out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        states, weight, bias, window = ctx.saved_tensors
        runs: Runs = ctx.runs
        kernel = weight.shape[2]
        taps, gaps = kernel - 1, runs.gaps(kernel - 1)
        spread = _with_gaps(states, window, runs, taps).float()
        summed = _before_silu(spread, weight, bias)
        # Of the sum before SiLU, at the cells of tokens; 0 at those of gaps.
        grads = torch.zeros_like(spread)
        own = grad[: runs.tokens].float()
        grads.index_copy_(0, gaps.cells, _silu_backward(own, summed.index_select(0, gaps.cells - taps)))
        count = spread.shape[0] - taps
        after = grads[taps:]
        grad_weight = torch.stack([torch.linalg.vecdot(after, spread[k : k + count], dim=0) for k in range(kernel)], 1)
        rows = weight[:, 0].float().t()
        into = grads * rows[taps]
        for k in range(taps):
            into[k : k + count].addcmul_(after, rows[k])
        grad_states = into.index_select(0, gaps.cells)
        if gaps.prompt.numel():
            grad_states.index_add_(0, gaps.prompt, into.index_select(0, gaps.prompt_cells))
        grad_states = F.pad(grad_states, (0, 0, 0, runs.padding)).to(states.dtype)
        grad_window = None
        if window is not None and ctx.needs_input_grad[3]:
            flat = into.new_zeros(window.shape[0] * taps, into.shape[1])
            flat.index_add_(0, gaps.window, into.index_select(0, gaps.empty_cells))
            grad_window = flat.view(-1, taps, into.shape[1]).transpose(1, 2).to(window.dtype)
        grad_bias = None if bias is None else grads.sum(0).to(bias.dtype)
        return grad_states, grad_weight[:, None].to(weight.dtype), grad_bias, grad_window, None


def _silu_backward(grad: torch.Tensor, summed: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = torch.ops.aten.silu_backward(grad, summed)
    return result
