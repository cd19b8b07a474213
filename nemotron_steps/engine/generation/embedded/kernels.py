"""Attention of one decoding step in one Triton kernel: QK-norm, rotary embedding, writing the cache, reading it.

Few rows of many keys would leave most of the GPU idle, so the keys of a row are then split over several programs, and a
second kernel joins what they found.

Imported only where there is a CUDA device, and by the test that runs it in Triton's interpreter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nemotron_steps.engine.generation.embedded.graph import PREFIX_FIELDS

_BLOCK, _WARPS, _STAGES = 32, 2, 3  # small programs: many are needed at once to keep the memory busy
_PROGRAMS = 512
"""As many as keep a GPU's memory busy: with more, splitting costs more than it gains."""
_SPLIT_COLUMNS = 256
"""Fewest columns of the cache that are worth a program of their own."""


@triton.jit  # type: ignore[untyped-decorator]
def _read(  # type: ignore[no-untyped-def]
    query, best, total, weighted, keys, values, first, end, scale, DIM: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Online softmax of `query` over cache columns [first, end), joined to what (best, total, weighted) hold."""
    dim = tl.arange(0, DIM)
    for begin in range(first, end, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        inside = column < end
        at = column[:, None] * DIM + dim[None, :]
        key = tl.load(keys + at, mask=inside[:, None], other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        scores = tl.where(inside[None, :], scores, float("-inf"))
        highest = tl.maximum(best, tl.max(scores, 1))
        decay = tl.exp(best - highest)
        weights = tl.exp(scores - highest[:, None])
        value = tl.load(values + at, mask=inside[:, None], other=0.0)
        total = total * decay + tl.sum(weights, 1)
        weighted = weighted * decay[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        best = highest
    return best, total, weighted


@triton.jit(do_not_specialize=["layer"])  # type: ignore[untyped-decorator]
def _decode_attention(  # type: ignore[no-untyped-def]
    qkv, norm, rotations, cache_keys, cache_values, out, found, column_now, row_state, prefixes,
    layer, columns, positions, epsilon, scale,
    LANES: tl.constexpr, QUERIES: tl.constexpr, PADDED: tl.constexpr, DIM: tl.constexpr, NORM: tl.constexpr,
    STATE: tl.constexpr, FIELDS: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """One program: one row, one of its key-value heads, one of SPLITS parts of its keys.

    The new token belongs to the first part, which joins it from registers.
    """
    lane, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, head = lane // LANES, lane % LANES
    column = tl.load(column_now)
    start = tl.load(row_state + row * STATE)
    # Rows that are not in use hold anything.
    position = tl.maximum(tl.minimum(column - tl.load(row_state + row * STATE + 1), positions - 1), 0)
    kind = cache_keys.dtype.element_ty
    dim, slot = tl.arange(0, DIM), tl.arange(0, PADDED)
    partner = dim ^ 1  # the other element of a rotary pair
    angle = rotations + position * DIM + dim // 2 * 2
    cos, sin = tl.load(angle), tl.load(angle + 1) * tl.where(dim % 2 == 0, -1.0, 1.0)

    mine = qkv + lane * (QUERIES + 2) * DIM
    at, exists = slot[:, None] * DIM, (slot < QUERIES)[:, None]
    query = tl.load(mine + at + dim[None, :], mask=exists, other=0.0).to(tl.float32)
    query_pair = tl.load(mine + at + partner[None, :], mask=exists, other=0.0).to(tl.float32)
    key = tl.load(mine + QUERIES * DIM + dim).to(tl.float32)
    key_pair = tl.load(mine + QUERIES * DIM + partner).to(tl.float32)
    value = tl.load(mine + (QUERIES + 1) * DIM + dim)
    if NORM:  # rounded where the plain operators round
        inverse = tl.rsqrt(tl.sum(query * query, 1) / DIM + epsilon)[:, None]
        scale_of, scale_of_pair = tl.load(norm + dim).to(tl.float32), tl.load(norm + partner).to(tl.float32)
        query = ((query * inverse).to(kind).to(tl.float32) * scale_of[None, :]).to(kind).to(tl.float32)
        query_pair = ((query_pair * inverse).to(kind).to(tl.float32) * scale_of_pair[None, :]).to(kind).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(key * key, 0) / DIM + epsilon)
        key_norm = norm + QUERIES * DIM
        scale_of, scale_of_pair = tl.load(key_norm + dim).to(tl.float32), tl.load(key_norm + partner).to(tl.float32)
        key = ((key * inverse).to(kind).to(tl.float32) * scale_of).to(kind).to(tl.float32)
        key_pair = ((key_pair * inverse).to(kind).to(tl.float32) * scale_of_pair).to(kind).to(tl.float32)
    query = (query * cos[None, :] + query_pair * sin[None, :]).to(kind)
    key = (key * cos + key_pair * sin).to(kind)

    keys, values = cache_keys + lane * columns * DIM, cache_values + lane * columns * DIM
    if part == 0:
        tl.store(keys + column * DIM + dim, key)
        tl.store(values + column * DIM + dim, value)
        best = tl.sum(query.to(tl.float32) * key.to(tl.float32)[None, :], 1) * scale
        total = tl.full((PADDED,), 1.0, tl.float32)
        weighted = tl.zeros((PADDED, DIM), tl.float32) + value.to(tl.float32)[None, :]
    else:
        best = tl.full((PADDED,), float("-inf"), tl.float32)
        total = tl.zeros((PADDED,), tl.float32)
        weighted = tl.zeros((PADDED, DIM), tl.float32)

    prefix = prefixes + row * FIELDS
    length = tl.load(prefix + 2).to(tl.int32)
    if length > 0:
        offset = layer * tl.load(prefix + 3) + head * tl.load(prefix + 4)
        far_keys = tl.load(prefix).to(tl.pointer_type(kind)) + offset
        far_values = tl.load(prefix + 1).to(tl.pointer_type(kind)) + offset
        share = tl.cdiv(length, SPLITS * BLOCK) * BLOCK
        begin = part * share
        best, total, weighted = _read(
            query, best, total, weighted, far_keys, far_values,
            begin, tl.minimum(begin + share, length), scale, DIM, BLOCK,
        )  # fmt: skip
    start, end = start.to(tl.int32), column.to(tl.int32)
    share = tl.cdiv(end - start, SPLITS * BLOCK) * BLOCK
    begin = start + part * share
    best, total, weighted = _read(
        query, best, total, weighted, keys, values, begin, tl.minimum(begin + share, end), scale, DIM, BLOCK
    )
    if SPLITS == 1:
        result = (weighted / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + lane * QUERIES * DIM + at + dim[None, :], result, mask=exists)
    else:
        mine = found + ((lane * SPLITS + part) * QUERIES + slot) * (DIM + 2)
        tl.store(mine[:, None] + dim[None, :], weighted, mask=exists)
        tl.store(mine + DIM, best, mask=slot < QUERIES)
        tl.store(mine + DIM + 1, total, mask=slot < QUERIES)


@triton.jit  # type: ignore[untyped-decorator]
def _join(found, out, QUERIES: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program: one query head of a row, whose parts become one softmax."""
    head = tl.program_id(0).to(tl.int64)
    lane, query = head // QUERIES, head % QUERIES
    dim, part = tl.arange(0, DIM), tl.arange(0, SPLITS)
    of_part = found + ((lane * SPLITS + part) * QUERIES + query) * (DIM + 2)
    best = tl.load(of_part + DIM)
    factor = tl.exp(best - tl.max(best, 0))  # 0 for a part without keys
    total = tl.sum(tl.load(of_part + DIM + 1) * factor, 0)
    weighted = tl.sum(tl.load(of_part[:, None] + dim[None, :]) * factor[:, None], 0)
    tl.store(out + head * DIM + dim, (weighted / total).to(out.dtype.element_ty))


def parts_of_keys(rows_and_heads: int, columns: int) -> int:
    """Programs that share the keys of one row and head: a power of two, from the numbers that a captured graph keeps.

    Args:
        rows_and_heads: rows * key-value heads.
        columns: of the cache, used or not.
    """
    useful = max(1, min(_PROGRAMS // rows_and_heads, columns // _SPLIT_COLUMNS, 64))
    return 1 << (useful.bit_length() - 1)


def decode_attention(
    qkv: torch.Tensor,
    norm: torch.Tensor | None,
    rotations: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    column: torch.Tensor,
    row_state: torch.Tensor,
    prefixes: torch.Tensor,
    *,
    layer: int,
    epsilon: float,
    scale: float,
) -> torch.Tensor:
    """Attention of one new token a row over its shared prefix, its own columns and itself.

    Writes the token's key and value to `column` of the cache.

    Args:
        qkv: [B, key-value heads * (R + 2) * D], the projection before norm and rotation.
        norm: [R + 1, D] QK-norm weights, the query's R times, then the key's; None for families without.
        rotations: float32 [positions, D / 2, 2], cosine and sine.
        keys, values: [rows, key-value heads, columns, D], one layer of the cache, at least B rows, contiguous.
        column: int64 [1], where the new token goes; on the device, so that a captured graph follows it.
        row_state: int64 [rows, n]: the first column each row holds, the column of its position 0, anything else.
        prefixes: int64 [rows, PREFIX_FIELDS]; 0 tokens for rows that share nothing.
        layer: which layer of the prefixes is read.

    Returns:
        [B, key-value heads * R * D]
    """
    rows, (_, lanes, columns, dim) = qkv.shape[0], keys.shape
    queries = qkv.shape[1] // (lanes * dim) - 2
    out = qkv.new_empty(rows, lanes * queries * dim)
    splits = parts_of_keys(rows * lanes, columns)
    found = qkv.new_empty((rows, lanes, splits, queries, dim + 2), dtype=torch.float32) if splits > 1 else out
    _decode_attention[(rows * lanes, splits)](
        qkv, norm if norm is not None else qkv, rotations, keys, values, out, found, column, row_state, prefixes,
        layer, columns, rotations.shape[0], epsilon, scale,
        LANES=lanes, QUERIES=queries, PADDED=max(16, triton.next_power_of_2(queries)), DIM=dim, NORM=norm is not None,
        STATE=row_state.shape[1], FIELDS=PREFIX_FIELDS, BLOCK=_BLOCK, SPLITS=splits,
        num_warps=_WARPS, num_stages=_STAGES,
    )  # fmt: skip
    if splits > 1:
        _join[(rows * lanes * queries,)](found, out, QUERIES=queries, DIM=dim, SPLITS=splits, num_warps=_WARPS)
    return out
