"""Context parallelism: each rank computes a share of a micro-batch's tokens.

For attention tokens are exchanged for heads (DeepSpeed Ulysses, arXiv 2309.14509), and back. Fewer key-value heads
than ranks are sent to several ranks; fewer query heads part the queries (docs/internals/more_ranks_than_heads.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemotron_steps.engine.kernels.varlen import Range
from nemotron_steps.engine.policy.distributed.partial_all_to_all import Exchange, collect, spread


@dataclass(frozen=True)
class HeadShares:
    """Who attends with which heads, and from whose tokens."""

    queries: Exchange
    keys: Exchange
    of: tuple[int, ...]

    def ranges(self, share: int) -> tuple[Range, ...]:
        """The flat tokens that the queries are of; a rank's share is of `share` tokens."""
        return tuple((number * share, (number + 1) * share) for number in self.of)


@cache
def head_shares(heads: int, key_value_heads: int, ranks: int, rank: int) -> HeadShares | None:
    """For the heads of a tensor-parallel rank; None where all of them divide over the ranks, see `to_heads`."""
    if key_value_heads % ranks == 0:
        return None
    parts = math.gcd(heads, ranks)  # of the heads, a rank in each `block` having one
    block = ranks // parts
    each = heads // parts

    def part(of: int) -> int:
        return of // block

    def team(of: int) -> int:
        # Ranks that part the heads between them, one of each block. Later tokens see more keys: every other block is
        # counted backwards, so that teams have the same work.
        place = of % block
        return block - 1 - place if part(of) % 2 else place

    # Of unequal numbers of key-value heads, several of one are sent as several.
    slots = math.lcm(key_value_heads, parts)
    needed = [
        tuple(slot * key_value_heads // slots for slot in range(number * slots // parts, (number + 1) * slots // parts))
        for number in range(parts)
    ]
    together = [of for of in range(ranks) if team(of) == team(rank)]
    queries = Exchange(
        heads,
        tuple(((part(to) * each, (part(to) + 1) * each),) if to in together else () for to in range(ranks)),
        tuple(each if source in together else 0 for source in range(ranks)),
        along=0,
    )
    keys = Exchange(
        key_value_heads,
        tuple(tuple((head, head + 1) for head in needed[part(to)]) for to in range(ranks)),
        (slots // parts,) * ranks,
        along=0,
    )
    return HeadShares(queries, keys, tuple(together))


def to_shares(
    query: Tensor, key: Tensor, value: Tensor, shares: HeadShares, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """[T / ranks, heads, head_dim] of this rank's tokens → what this rank attends with. Collective."""
    key_value = spread(torch.cat((key, value), dim=2), shares.keys, group)
    whole_key, whole_value = key_value.chunk(2, dim=2)
    return spread(query, shares.queries, group), whole_key, whole_value


def from_shares(states: Tensor, shares: HeadShares, group: dist.ProcessGroup) -> Tensor:
    """[queries, heads / parts · head_dim] → [T / ranks, heads, head_dim] of this rank's tokens. Collective."""
    each = max(shares.queries.received)
    return collect(states.view(states.shape[0], each, -1), shares.queries, group)


def to_heads(states: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[T / ranks, heads, head_dim] of this rank's tokens → [T, heads / ranks, head_dim] of all tokens."""
    return _Exchange.apply(states, group, 1, 0)


def to_tokens(states: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[T, heads / ranks · head_dim] → [T / ranks, heads · head_dim]: the inverse."""
    return _Exchange.apply(states, group, 0, 1)


def sum_parts(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum over ranks that each hold part of a result and then all compute the same: the gradient passes unchanged."""
    return _SumParts.apply(values, group)


class _Exchange(torch.autograd.Function):
    """Split dimension `give` over the ranks and concatenate what they send along dimension `take`."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, group: dist.ProcessGroup, give: int, take: int) -> Tensor:
        ctx.group, ctx.give, ctx.take = group, give, take
        return _exchange(states, group, give, take)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(grad, ctx.group, ctx.take, ctx.give), None, None, None


def _exchange(states: Tensor, group: dist.ProcessGroup, give: int, take: int) -> Tensor:
    ranks = dist.get_world_size(group)
    outgoing = torch.stack(states.chunk(ranks, dim=give))
    incoming = torch.empty_like(outgoing)
    dist.all_to_all_single(incoming, outgoing, group=group)
    return torch.cat(incoming.unbind(), dim=take)


class _SumParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
