"""Fewer key-value heads than tensor-parallel ranks: each rank gets the head that its queries need.

linear_qkv is cut as megatron-core cuts it, evenly by rows of [q heads of group 0, k 0, v 0, q heads of group 1, …],
wherever the cuts fall. So every row of the weight is on one rank: nothing is held, updated, counted or saved twice. Its
product is what goes around. megatron-core gathers all of it on every rank; here each gets only the columns that it
attends with, H / ranks query heads, one key and one value.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.distributed as dist

from nemotron_steps.engine.policy.exchange import Exchange, spread
from nemotron_steps.engine.policy.query_runs import Range, size


def own_heads(
    mixed: torch.Tensor, heads: int, key_value_heads: int, head_dim: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """From a rank's rows of linear_qkv to the heads that it attends with.

    Args:
        mixed: [T, (heads + 2 · key_value_heads) · head_dim / ranks].
        heads, key_value_heads: of the whole layer; fewer of the latter than ranks, which are a multiple of them.
        group: the tensor-parallel ranks.

    Returns:
        [T, (heads / ranks + 2) · head_dim]: query heads, the key and the value that they share.
    """
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
