"""Exchanges of heads between ranks, and context parallelism: each rank computes a share of the tokens. For attention
tokens are exchanged for heads (DeepSpeed Ulysses, arXiv 2309.14509), and back. Fewer key-value heads than ranks are
sent to several ranks; fewer query heads part the queries (docs/internals/more_ranks_than_heads.md)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemotron_steps.engine.policy.token_layout import Range, size


@dataclass(frozen=True)
class Exchange:
    """Who gets what of dimension 1 of tensors [n, width, …], with the same n on every rank."""

    width: int
    sent: tuple[tuple[Range, ...], ...]  # rank → ranges that it gets
    received: tuple[int, ...]  # rank → how much comes from it
    along: int  # dimension of what is received: 1, or 0 for the same columns of rows of their own


def spread(states: Tensor, exchange: Exchange, group: dist.ProcessGroup) -> Tensor:
    """[n, width, …] of every rank → what this rank wants of them. Collective."""
    return _PartialAllToAll.apply(states, exchange, group, False)


def collect(parts: Tensor, exchange: Exchange, group: dist.ProcessGroup) -> Tensor:
    """What `spread` returned → [n, width, …], sums where several ranks had the same."""
    return _PartialAllToAll.apply(parts, exchange, group, True)


class _PartialAllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, exchange: Exchange, group: dist.ProcessGroup, home: bool) -> Tensor:
        ctx.exchange, ctx.group, ctx.home = exchange, group, home
        return (_collect if home else _spread)(tensor, exchange, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return (_spread if ctx.home else _collect)(grad, ctx.exchange, ctx.group), None, None, None


def _spread(states: Tensor, exchange: Exchange, group: dist.ProcessGroup) -> Tensor:
    rows, tail = states.shape[0], states.shape[2:]
    outgoing = [
        torch.cat([states[:, first:after] for first, after in ranges], dim=1) if ranges else states[:, :0]
        for ranges in exchange.sent
    ]
    incoming = _send(outgoing, [rows * count for count in exchange.received], tail, group)
    shapes = [(rows, count, *tail) for count in exchange.received]
    parts = [part.view(shape) for part, shape in zip(incoming, shapes, strict=True) if shape[1]]
    return torch.cat(parts, dim=exchange.along)


def _collect(parts: Tensor, exchange: Exchange, group: dist.ProcessGroup) -> Tensor:
    sources = [count for count in exchange.received if count]
    rows = parts.shape[0] if exchange.along == 1 else parts.shape[0] // len(sources)
    tail, totals = parts.shape[2:], [sum(map(size, ranges)) for ranges in exchange.sent]
    pieces = iter(torch.split(parts, sources if exchange.along == 1 else rows, dim=exchange.along))
    outgoing = [next(pieces) if count else parts[:0] for count in exchange.received]
    incoming = _send(outgoing, [rows * total for total in totals], tail, group)
    # Several half-precision parts of the same columns are added up in float32.
    exact = sum(totals) > exchange.width and parts.dtype.itemsize < 4
    states = parts.new_zeros(rows, exchange.width, *tail, dtype=torch.float32 if exact else parts.dtype)
    for piece, total, ranges in zip(incoming, totals, exchange.sent, strict=True):
        returned = torch.split(piece.view(rows, total, *tail), list(map(size, ranges)), dim=1)
        for (first, after), part in zip(ranges, returned, strict=True):
            states[:, first:after] += part
    return states.to(parts.dtype)


def _send(
    outgoing: Sequence[Tensor], sizes: Sequence[int], tail: Sequence[int], group: dist.ProcessGroup
) -> tuple[Tensor, ...]:
    """A tensor for each rank → a flat one from each, `sizes` of them times `tail`."""
    flat = torch.cat([tensor.reshape(-1) for tensor in outgoing])
    counts = [count * math.prod(tail) for count in sizes]
    arrived = flat.new_empty(sum(counts))
    dist.all_to_all_single(arrived, flat, counts, [tensor.numel() for tensor in outgoing], group=group)
    return torch.split(arrived, counts)


@cache
def columns(heads: int, key_value_heads: int, head_dim: int, ranks: int, rank: int) -> Exchange:
    """Which columns of linear_qkv's product go where, under more tensor-parallel ranks than key-value heads. What a
    rank then has is [T, (heads / ranks + 2) · head_dim]."""
    width = (heads + 2 * key_value_heads) * head_dim // ranks
    queries, sharing = heads // ranks * head_dim, ranks // key_value_heads

    def wanted(by: int) -> tuple[Range, Range]:
        start = by // sharing * sharing * width
        first = start + by % sharing * queries
        return (first, first + queries), (start + sharing * queries, start + sharing * width)

    def sent(source: int, by: int) -> tuple[Range, ...]:
        held = source * width, (source + 1) * width
        cut = [(max(first, held[0]) - held[0], min(after, held[1]) - held[0]) for first, after in wanted(by)]
        return tuple((first, after) for first, after in cut if first < after)

    received = tuple(sum(map(size, sent(source, rank))) for source in range(ranks))
    return Exchange(width, tuple(sent(rank, by) for by in range(ranks)), received, along=1)


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
    """For a tensor-parallel rank; None where all heads divide over the ranks: `to_heads`."""
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


def to_heads(states: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[T / ranks, heads, head_dim] → [T, heads / ranks, head_dim]."""
    return _Exchange.apply(states, group, 1, 0)


def to_tokens(states: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[T, heads / ranks · head_dim] → [T / ranks, heads · head_dim]: the inverse."""
    return _Exchange.apply(states, group, 0, 1)


class _Exchange(torch.autograd.Function):
    """Split along `give` over the ranks, concatenate what they send along `take`."""

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
    """Sum over ranks that then all compute the same: the gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


sum_parts = _SumParts.apply
