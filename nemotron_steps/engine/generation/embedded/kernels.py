"""Attention of one decoding step in Triton: QK-norm, rotary embedding and writing the cache, then reading it.

Few rows of many keys would leave most of the GPU idle, so the keys of a row are then split over several programs. With
many rows, those that share a prefix read it together first: a matrix unit takes 16 queries at once. Imported only where
there is a CUDA device, and by the test that runs it in Triton's interpreter.
"""

import torch
import triton
import triton.language as tl

from nemotron_steps.engine.generation.embedded.cached_model import DeviceView
from nemotron_steps.engine.generation.embedded.prefix_cache import MATRIX_ROWS, PREFIX_FIELDS, rows_together

_WHOLE = {"BLOCK": 16, "num_warps": 1, "num_stages": 4}
_SPLIT = {"BLOCK": 32, "num_warps": 2, "num_stages": 3}
"""Small programs: many are needed at once to keep the memory busy. Measured with bench_decode_attention."""
_PROGRAMS = 512
"""As many as keep a GPU's memory busy: with more, splitting costs more than it gains."""
_SPLIT_COLUMNS = 256
"""Fewest columns of the cache that are worth a program of their own."""
_PREFIX_PROGRAMS = 1056
"""That go through the shared prefixes: several for each multiprocessor of the largest GPUs."""


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


@triton.jit  # type: ignore[untyped-decorator]
def _place(  # type: ignore[no-untyped-def]
    qkv, norm, rotations, queries, cache_keys, cache_values, column_now, row_state, columns, positions, epsilon,
    LANES: tl.constexpr, QUERIES: tl.constexpr, SLOTS: tl.constexpr, DIM: tl.constexpr, NORM: tl.constexpr,
    STATE: tl.constexpr,
):  # fmt: skip
    """One program: norm and rotate a row's queries and key of one key-value head; key and value go to the cache."""
    lane = tl.program_id(0).to(tl.int64)
    dim, slot = tl.arange(0, DIM), tl.arange(0, SLOTS)  # its queries, then its key
    partner = dim ^ 1  # the other element of a rotary pair
    kind = cache_keys.dtype.element_ty
    mine = qkv + lane * (QUERIES + 2) * DIM
    exists = (slot <= QUERIES)[:, None]
    at = slot[:, None] * DIM
    states = tl.load(mine + at + dim[None, :], mask=exists, other=0.0).to(tl.float32)
    pair = tl.load(mine + at + partner[None, :], mask=exists, other=0.0).to(tl.float32)
    value = tl.load(mine + (QUERIES + 1) * DIM + dim)
    column, row = tl.load(column_now), lane // LANES
    # Rows that are not in use hold anything.
    position = tl.maximum(tl.minimum(column - tl.load(row_state + row * STATE + 1), positions - 1), 0)
    angle = rotations + position * DIM + dim // 2 * 2
    cos, sin = tl.load(angle), tl.load(angle + 1) * tl.where(dim % 2 == 0, -1.0, 1.0)
    if NORM:  # rounded where the plain operators round
        scale = tl.load(norm + at + dim[None, :], mask=exists, other=0.0).to(tl.float32)
        scale_of_pair = tl.load(norm + at + partner[None, :], mask=exists, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(states * states, 1) / DIM + epsilon)[:, None]
        states = ((states * inverse).to(kind).to(tl.float32) * scale).to(kind).to(tl.float32)
        pair = ((pair * inverse).to(kind).to(tl.float32) * scale_of_pair).to(kind).to(tl.float32)
    states = (states * cos[None, :] + pair * sin[None, :]).to(kind)
    tl.store(queries + lane * QUERIES * DIM + at + dim[None, :], states, mask=(slot < QUERIES)[:, None])
    to = (lane * columns + column) * DIM
    tl.store(cache_keys + to + at - QUERIES * DIM + dim[None, :], states, mask=(slot == QUERIES)[:, None])
    tl.store(cache_values + to + dim, value)


@triton.jit(do_not_specialize=["layer"])  # type: ignore[untyped-decorator]
def _prefix_attention(  # type: ignore[no-untyped-def]
    queries, found, prefixes, sharing, layer, scale,
    LANES: tl.constexpr, QUERIES: tl.constexpr, PADDED: tl.constexpr, DIM: tl.constexpr, FIELDS: tl.constexpr,
    BLOCK: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Attention of rows over the prefix that they share, TOGETHER of them and one key-value head at a time."""
    dim, slot = tl.arange(0, DIM), tl.arange(0, PADDED)
    units = tl.load(sharing).to(tl.int32) * LANES
    kind = queries.dtype.element_ty
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        head, first = unit % LANES, 1 + (unit // LANES) * TOGETHER
        row = tl.load(sharing + first + slot // QUERIES, mask=slot < TOGETHER * QUERIES, other=-1)
        prefix = prefixes + tl.load(sharing + first) * FIELDS
        exists = row >= 0
        mine = (tl.maximum(row, 0) * LANES + head) * QUERIES + slot % QUERIES
        query = tl.load(queries + mine[:, None] * DIM + dim[None, :], mask=exists[:, None], other=0.0)
        offset = layer * tl.load(prefix + 3) + head * tl.load(prefix + 4)
        keys = tl.load(prefix).to(tl.pointer_type(kind)) + offset
        values = tl.load(prefix + 1).to(tl.pointer_type(kind)) + offset
        best = tl.full((PADDED,), float("-inf"), tl.float32)
        total = tl.zeros((PADDED,), tl.float32)
        weighted = tl.zeros((PADDED, DIM), tl.float32)
        best, total, weighted = _read(
            query, best, total, weighted, keys, values, 0, tl.load(prefix + 2).to(tl.int32), scale, DIM, BLOCK
        )
        to = found + mine * (DIM + 2)
        tl.store(to[:, None] + dim[None, :], weighted, mask=exists[:, None])
        tl.store(to + DIM, best, mask=exists)
        tl.store(to + DIM + 1, total, mask=exists)


@triton.jit(do_not_specialize=["layer"])  # type: ignore[untyped-decorator]
def _decode_attention(  # type: ignore[no-untyped-def]
    queries, cache_keys, cache_values, out, found, column_now, row_state, prefixes, layer, columns, scale,
    LANES: tl.constexpr, QUERIES: tl.constexpr, PADDED: tl.constexpr, DIM: tl.constexpr, STATE: tl.constexpr,
    FIELDS: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """One program: one row, one of its key-value heads, one of SPLITS parts of its keys. With one part, `found` has
    what the row's queries found in its shared prefix."""
    lane, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, head = lane // LANES, lane % LANES
    dim, slot = tl.arange(0, DIM), tl.arange(0, PADDED)
    exists = (slot < QUERIES)[:, None]
    at = slot[:, None] * DIM + dim[None, :]
    query = tl.load(queries + lane * QUERIES * DIM + at, mask=exists, other=0.0)
    prefix = prefixes + row * FIELDS
    length = tl.load(prefix + 2).to(tl.int32)
    start = tl.load(row_state + row * STATE).to(tl.int32)
    end = tl.load(column_now).to(tl.int32) + 1
    best = tl.full((PADDED,), float("-inf"), tl.float32)
    total = tl.zeros((PADDED,), tl.float32)
    weighted = tl.zeros((PADDED, DIM), tl.float32)
    if length > 0:
        if SPLITS == 1:
            there = found + (lane * QUERIES + slot) * (DIM + 2)
            best = tl.load(there + DIM, mask=slot < QUERIES, other=0.0)
            total = tl.load(there + DIM + 1, mask=slot < QUERIES, other=1.0)
            weighted = tl.load(there[:, None] + dim[None, :], mask=exists, other=0.0)
        else:
            kind = cache_keys.dtype.element_ty
            offset = layer * tl.load(prefix + 3) + head * tl.load(prefix + 4)
            far_keys = tl.load(prefix).to(tl.pointer_type(kind)) + offset
            far_values = tl.load(prefix + 1).to(tl.pointer_type(kind)) + offset
            share = tl.cdiv(length, SPLITS * BLOCK) * BLOCK
            begin = part * share
            best, total, weighted = _read(
                query, best, total, weighted, far_keys, far_values,
                begin, tl.minimum(begin + share, length), scale, DIM, BLOCK,
            )  # fmt: skip
    keys, values = cache_keys + lane * columns * DIM, cache_values + lane * columns * DIM
    share = tl.cdiv(end - start, SPLITS * BLOCK) * BLOCK
    begin = start + part * share
    best, total, weighted = _read(
        query, best, total, weighted, keys, values, begin, tl.minimum(begin + share, end), scale, DIM, BLOCK
    )
    if SPLITS == 1:
        total = tl.where(total > 0, total, 1.0)  # of rows that are not in use
        result = (weighted / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + lane * QUERIES * DIM + at, result, mask=exists)
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
    """Programs that share the keys of one row and head: a power of two, from numbers that a captured graph keeps (rows
    * key-value heads, and columns of the cache, used or not)."""
    useful = max(1, min(_PROGRAMS // rows_and_heads, columns // _SPLIT_COLUMNS, 64))
    return 1 << (useful.bit_length() - 1)


def decode_attention(
    qkv: torch.Tensor,
    norm: torch.Tensor | None,
    rotations: torch.Tensor,
    cache: DeviceView,
    *,
    layer: int,
    epsilon: float,
    scale: float,
) -> torch.Tensor:
    """Attention of one new token a row over its shared prefix, its own columns and itself, [B, key-value heads * R *
    D], of `qkv` [B, key-value heads * (R + 2) * D], the projection before norm [R + 1, D] (the query's weights R times,
    then the key's) and rotation (float32 [positions, D / 2, 2], cosine and sine). Writes the token's key and value to
    the cache's `column`."""
    keys, values = cache.keys[layer], cache.values[layer]
    rows, (_, lanes, columns, dim) = qkv.shape[0], keys.shape
    queries = qkv.shape[1] // (lanes * dim) - 2
    turned, out = qkv.new_empty(2, rows, lanes * queries * dim).unbind()
    splits = parts_of_keys(rows * lanes, columns)
    padded, state = max(MATRIX_ROWS, triton.next_power_of_2(queries)), cache.row_state.shape[1]
    found = qkv.new_empty((rows, lanes, splits, queries, dim + 2), dtype=torch.float32)
    _place[(rows * lanes,)](
        qkv, qkv if norm is None else norm, rotations, turned, keys, values, cache.column, cache.row_state,
        columns, rotations.shape[0], epsilon,
        LANES=lanes, QUERIES=queries, SLOTS=triton.next_power_of_2(queries + 1), DIM=dim, NORM=norm is not None,
        STATE=state, num_warps=1,
    )  # fmt: skip
    if splits == 1:
        _prefix_attention[(_PREFIX_PROGRAMS,)](
            turned, found, cache.prefixes, cache.sharing, layer, scale,
            LANES=lanes, QUERIES=queries, PADDED=padded, DIM=dim, FIELDS=PREFIX_FIELDS,
            TOGETHER=rows_together(queries), **_WHOLE,
        )  # fmt: skip
    _decode_attention[(rows * lanes, splits)](
        turned, keys, values, out, found, cache.column, cache.row_state, cache.prefixes, layer, columns, scale,
        LANES=lanes, QUERIES=queries, PADDED=padded, DIM=dim, STATE=state, FIELDS=PREFIX_FIELDS,
        SPLITS=splits, **(_WHOLE if splits == 1 else _SPLIT),
    )  # fmt: skip
    if splits > 1:
        _join[(rows * lanes * queries,)](found, out, QUERIES=queries, DIM=dim, SPLITS=splits, num_warps=2)
    return out
