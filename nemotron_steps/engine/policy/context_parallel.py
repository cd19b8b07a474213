"""Context parallelism: each rank computes a share of a micro-batch's tokens.

Attention needs whole sequences, so there tokens are exchanged for heads (DeepSpeed Ulysses, arXiv 2309.14509): every
rank attends over all tokens with its share of the heads, and the exchange is undone. All other layers work token by
token. Compared with passing keys and values around a ring, attention itself stays the same code, on CPU and CUDA, and
every rank has the same work; the price is that the key-value heads must divide over the ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def to_heads(states: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[T / ranks, heads, head_dim] of this rank's tokens → [T, heads / ranks, head_dim] of all tokens."""
    exchanged: torch.Tensor = _Exchange.apply(states, group, 1, 0)  # type: ignore[no-untyped-call]
    return exchanged


def to_tokens(states: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[T, heads / ranks · head_dim] → [T / ranks, heads · head_dim]: the inverse."""
    exchanged: torch.Tensor = _Exchange.apply(states, group, 0, 1)  # type: ignore[no-untyped-call]
    return exchanged


def sum_parts(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum over ranks that each hold part of a result and then all compute the same from it.

    The gradient is passed on unchanged: every rank already has the whole of it.
    """
    total: torch.Tensor = _SumParts.apply(values, group)  # type: ignore[no-untyped-call]
    return total


class _Exchange(torch.autograd.Function):
    """Split dimension `give` over the ranks and concatenate what they send along dimension `take`."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, group: dist.ProcessGroup, give: int, take: int) -> torch.Tensor:  # type: ignore[override]
        ctx.group, ctx.give, ctx.take = group, give, take
        return _exchange(states, group, give, take)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # type: ignore[override]
        return _exchange(grad, ctx.group, ctx.take, ctx.give), None, None, None


def _exchange(states: torch.Tensor, group: dist.ProcessGroup, give: int, take: int) -> torch.Tensor:
    ranks = dist.get_world_size(group)
    outgoing = torch.stack(states.chunk(ranks, dim=give))
    incoming = torch.empty_like(outgoing)
    dist.all_to_all_single(incoming, outgoing, group=group)
    return torch.cat(incoming.unbind(), dim=take)


class _SumParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:  # type: ignore[override]
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grad, None
