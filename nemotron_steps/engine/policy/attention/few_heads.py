"""Fewer heads than ranks: key-value heads under tensor parallelism, and context parallelism beyond the heads."""

from __future__ import annotations

from functools import cache

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from nemotron_steps.engine.kernels.varlen import Range, size
from nemotron_steps.engine.policy.distributed.partial_all_to_all import Exchange, spread
from nemotron_steps.engine.policy.token_layout import VarlenSegments


def gqa_kv_exchange(mixed: Tensor, heads: int, key_value_heads: int, head_dim: int, group: dist.ProcessGroup) -> Tensor:
    """From a rank's rows of linear_qkv [T, …] to [T, (heads / ranks + 2) · head_dim] that it attends with."""
    exchange = columns(heads, key_value_heads, head_dim, dist.get_world_size(group), dist.get_rank(group))
    return spread(mixed, exchange, group)


@cache
def columns(heads: int, key_value_heads: int, head_dim: int, ranks: int, rank: int) -> Exchange:
    """Which columns of the product go where."""
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


def part_attention(query: Tensor, key: Tensor, value: Tensor, part: VarlenSegments) -> Tensor:
    """Attend within each sequence: query [queries, heads, head_dim], in the order of `part`, to keys of all T tokens.

    Every rank has queries, if only padding's, so that all take part in every exchange of the backward pass.
    """
    flash = query.is_cuda and query.dtype is not torch.float32
    return (_flash if flash else _sdpa)(query, key, value, part).flatten(1)


def _flash(query: Tensor, key: Tensor, value: Tensor, part: VarlenSegments) -> Tensor:
    seen_keys, seen_values = key.index_select(0, part.keys), value.index_select(0, part.keys)
    out: Tensor = torch.ops.aten._flash_attention_forward(
        query.contiguous(), seen_keys, seen_values, *part.cu_seqlens, *part.max_seqlens, 0.0, True, False
    )[0]
    return out


def _sdpa(query: Tensor, key: Tensor, value: Tensor, part: VarlenSegments) -> Tensor:
    outs = []
    queries = torch.split(query, [size(segment.queries) for segment in part.segments])
    for segment, asking in zip(part.segments, queries, strict=True):
        seen = [torch.cat([of[first:after] for first, after in segment.keys]) for of in (key, value)]
        rows, columns = asking.shape[0], seen[0].shape[0]
        mask = torch.ones(rows, columns, dtype=torch.bool, device=query.device).tril_(columns - rows)
        heads_first = [states.transpose(0, 1)[None] for states in (asking, *seen)]
        out = F.scaled_dot_product_attention(
            heads_first[0],
            heads_first[1],
            heads_first[2],
            attn_mask=mask if rows < columns else None,
            is_causal=rows == columns,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)
