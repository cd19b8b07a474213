"""Parts of a dimension sent between ranks, of which several may want the same; `spread` and `collect` are adjoint."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemotron_steps.engine.kernels.varlen import Range, size


@dataclass(frozen=True)
class Exchange:
    """Who gets what of dimension 1 of tensors [n, width, …], with the same n on every rank."""

    width: int
    sent: tuple[tuple[Range, ...], ...]
    received: tuple[int, ...]
    along: int


def spread(states: Tensor, exchange: Exchange, group: dist.ProcessGroup) -> Tensor:
    """[n, width, …] of every rank → what this rank wants of them. Collective."""
    return _PartialAllToAll.apply(states, exchange, group, False)


def collect(parts: Tensor, exchange: Exchange, group: dist.ProcessGroup) -> Tensor:
    """What `spread` returned on every rank → [n, width, …], sums where several ranks had the same. Collective."""
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
