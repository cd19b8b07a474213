"""Tokens of unequal rows laid out in cells, and back, by gathers both ways."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable


def pad(tokens: torch.Tensor, source: torch.Tensor | None, cells: torch.Tensor | None) -> torch.Tensor:
    """[tokens, …] → [cells, …].

    Args:
        source: int64 [cells], token of each; None where every cell is a token, in order.
        cells: int64 [tokens], the cell whose gradient is the token's. Other cells hold copies that nothing may depend
            on.
    """
    if source is None:
        return tokens
    padded: torch.Tensor = _Pad.apply(tokens, source, cells)  # type: ignore[no-untyped-call]
    return padded


def unpad(padded: torch.Tensor, cells: torch.Tensor | None) -> torch.Tensor:
    """The inverse of `pad`. [cells, …] → [tokens, …]."""
    if cells is None:
        return padded
    tokens: torch.Tensor = _Unpad.apply(padded, cells)  # type: ignore[no-untyped-call]
    return tokens


class _Pad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, source: torch.Tensor, cells: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(cells)
        return tokens.index_select(0, source)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        (cells,) = ctx.saved_tensors
        return grad.index_select(0, cells), None, None


class _Unpad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, padded: torch.Tensor, cells: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(cells)
        ctx.count = padded.shape[0]
        return padded.index_select(0, cells)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        (cells,) = ctx.saved_tensors
        return grad.new_zeros(ctx.count, *grad.shape[1:]).index_copy_(0, cells, grad), None
