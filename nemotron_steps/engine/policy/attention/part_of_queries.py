"""Attention of a part of the tokens to the keys and values of all: context parallelism beyond the number of heads.

A run of queries sees its prompt, where that is shared, and its own sequence up to each of them: of all keys that its
last query sees, its first query lacks as many as there are queries after it. So runs are causal attention whose mask is
aligned at the end, over keys that are gathered run by run. A prompt is gathered once for each run that shares it, which
is the price of this path; on CUDA it is one call of FlashAttention, on CPU one of SDPA a run.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from nemotron_steps.engine.policy.query_runs import QueryRuns, size


def part_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, part: QueryRuns) -> torch.Tensor:
    """Attend within each sequence.

    Every rank has queries, if only padding's, so that all take part in every exchange of the backward pass.

    Args:
        query: [queries, heads, head_dim], in the order of `part`.
        key, value: [T, key-value heads, head_dim].

    Returns:
        [queries, heads · head_dim]
    """
    flash = query.is_cuda and query.dtype is not torch.float32
    return (_flash if flash else _sdpa)(query, key, value, part).flatten(1)


def _flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, part: QueryRuns) -> torch.Tensor:
    seen_keys, seen_values = key.index_select(0, part.keys), value.index_select(0, part.keys)
    out: torch.Tensor = torch.ops.aten._flash_attention_forward(
        query.contiguous(), seen_keys, seen_values, *part.starts, *part.longest, 0.0, True, False
    )[0]
    return out


def _sdpa(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, part: QueryRuns) -> torch.Tensor:
    outs = []
    queries = torch.split(query, [size(run.queries) for run in part.runs])
    for run, asking in zip(part.runs, queries, strict=True):
        seen = [torch.cat([of[first:after] for first, after in run.keys]) for of in (key, value)]
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
