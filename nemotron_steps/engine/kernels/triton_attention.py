"""Causal attention of packed rows whose prompts are shared, in Triton (docs/internals/packed_attention.md). A row sees
all of its prompt's keys, if it has one, then its own up to each query. Shapes: T tokens, H heads, h key-value heads, D
head size. A row of `rows` [n, 6] int32 is FIELDS, in tokens."""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

FIELDS = ("start", "length", "prompt start", "prompt length", "first follower", "after the last follower")
"""A row's followers are the rows whose prompt it is; they lie one after another."""


class Tile(NamedTuple):
    """How one kernel cuts its work."""

    queries: int
    keys: int
    warps: int
    stages: int


FORWARD = Tile(128, 32, 4, 3)
FOR_QUERIES = Tile(64, 32, 4, 3)
FOR_KEYS = Tile(64, 128, 8, 1)
"""The fastest of ten on an H200. Of the first two, `queries` is a multiple of `keys`; of this the other way."""

_LOG2_E = math.log2(math.e)


@triton.jit
def _attend(
    result, total, largest, queries, query_at, key, value, keys_from, first, end, kv_head, scale,
    CAUSAL: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr
):  # fmt: skip
    """Go on with an online softmax over the keys first to end - 1, counted from `keys_from`."""
    column = tl.arange(0, WIDTH)
    for block in range(first, end, KEYS):
        at = block + tl.arange(0, KEYS)
        places = ((keys_from + at).to(tl.int64)[:, None] * KV_HEADS + kv_head) * WIDTH + column[None, :]
        inside = (at < end)[:, None]
        keys = tl.load(key + places, mask=inside, other=0.0)
        scores = tl.dot(queries, tl.trans(keys)) * scale
        seen = (at < end)[None, :]
        if CAUSAL:
            seen = seen & (at[None, :] <= query_at[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(largest - higher)
        total = total * shrink + tl.sum(weights, 1)
        values = tl.load(value + places, mask=inside, other=0.0)
        result = result * shrink[:, None] + tl.dot(weights.to(values.dtype), values)
        largest = higher
    return result, total, largest


@triton.jit(do_not_specialize=["tokens"])
def _forward(
    query, key, value, out, lse, rows, tokens, scale,
    KV_HEADS: tl.constexpr, SHARE: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr
):  # fmt: skip
    """One program: QUERIES queries of one row and head."""
    head, fields = tl.program_id(0), rows + tl.program_id(2) * 6
    first = tl.program_id(1) * QUERIES
    start, length = tl.load(fields), tl.load(fields + 1)
    if first >= length:
        return
    at = first + tl.arange(0, QUERIES)
    inside = at < length
    place = (start + at).to(tl.int64)
    places = (place[:, None] * (KV_HEADS * SHARE) + head) * WIDTH + tl.arange(0, WIDTH)[None, :]
    queries = tl.load(query + places, mask=inside[:, None], other=0.0)
    result = tl.zeros((QUERIES, WIDTH), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    largest = tl.full((QUERIES,), float("-inf"), tl.float32)
    kv_head = head // SHARE
    result, total, largest = _attend(
        result, total, largest, queries, at, key, value, tl.load(fields + 2), 0, tl.load(fields + 3), kv_head, scale,
        False, KV_HEADS, WIDTH, KEYS,
    )  # fmt: skip
    result, total, largest = _attend(
        result, total, largest, queries, at, key, value, start, 0, first, kv_head, scale,
        False, KV_HEADS, WIDTH, KEYS,
    )  # fmt: skip
    result, total, largest = _attend(
        result, total, largest, queries, at, key, value, start, first, tl.minimum(first + QUERIES, length), kv_head,
        scale, True, KV_HEADS, WIDTH, KEYS,
    )  # fmt: skip
    tl.store(out + places, (result / total[:, None]).to(out.dtype.element_ty), mask=inside[:, None])
    tl.store(lse + head.to(tl.int64) * tokens + place, (largest + tl.log2(total)) * 0.6931471805599453, mask=inside)


@triton.jit
def _query_gradient(
    result, queries, grads, log_total, along, query_at, key, value, keys_from, first, end, kv_head, scale,
    CAUSAL: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr
):  # fmt: skip
    """Add what comes through the keys first to end - 1, counted from `keys_from`; without the scale."""
    column = tl.arange(0, WIDTH)
    for block in range(first, end, KEYS):
        at = block + tl.arange(0, KEYS)
        places = ((keys_from + at).to(tl.int64)[:, None] * KV_HEADS + kv_head) * WIDTH + column[None, :]
        inside = (at < end)[:, None]
        keys = tl.load(key + places, mask=inside, other=0.0)
        values = tl.load(value + places, mask=inside, other=0.0)
        weights = tl.exp2(tl.dot(queries, tl.trans(keys)) * scale - log_total[:, None])
        seen = (at < end)[None, :]
        if CAUSAL:
            seen = seen & (at[None, :] <= query_at[:, None])
        weights = tl.where(seen, weights, 0.0)
        inner = weights * (tl.dot(grads, tl.trans(values)) - along[:, None])
        result += tl.dot(inner.to(keys.dtype), keys)
    return result


@triton.jit(do_not_specialize=["tokens"])
def _backward_for_queries(
    query, key, value, out, lse, grad, grad_query, products, rows, tokens, scale, factor,
    KV_HEADS: tl.constexpr, SHARE: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr
):  # fmt: skip
    """As `_forward`; products [H, T] get each output's product with its gradient."""
    head, fields = tl.program_id(0), rows + tl.program_id(2) * 6
    first = tl.program_id(1) * QUERIES
    start, length = tl.load(fields), tl.load(fields + 1)
    if first >= length:
        return
    at = first + tl.arange(0, QUERIES)
    inside = at < length
    place = (start + at).to(tl.int64)
    places = (place[:, None] * (KV_HEADS * SHARE) + head) * WIDTH + tl.arange(0, WIDTH)[None, :]
    queries = tl.load(query + places, mask=inside[:, None], other=0.0)
    grads = tl.load(grad + places, mask=inside[:, None], other=0.0)
    outs = tl.load(out + places, mask=inside[:, None], other=0.0)
    along = tl.sum(outs.to(tl.float32) * grads.to(tl.float32), 1)
    of_head = head.to(tl.int64) * tokens + place
    tl.store(products + of_head, along, mask=inside)
    log_total = tl.load(lse + of_head, mask=inside, other=0.0) * 1.4426950408889634
    result = tl.zeros((QUERIES, WIDTH), tl.float32)
    kv_head = head // SHARE
    result = _query_gradient(
        result, queries, grads, log_total, along, at, key, value, tl.load(fields + 2), 0, tl.load(fields + 3), kv_head,
        scale, False, KV_HEADS, WIDTH, KEYS,
    )  # fmt: skip
    result = _query_gradient(
        result, queries, grads, log_total, along, at, key, value, start, 0, first, kv_head,
        scale, False, KV_HEADS, WIDTH, KEYS,
    )  # fmt: skip
    result = _query_gradient(
        result, queries, grads, log_total, along, at, key, value, start, first, tl.minimum(first + QUERIES, length),
        kv_head, scale, True, KV_HEADS, WIDTH, KEYS,
    )  # fmt: skip
    tl.store(grad_query + places, (result * factor).to(grad_query.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _key_gradients(
    for_keys, for_values, keys, values, key_at, query, grad, lse, products, tokens, queries_from, first, end, head,
    scale, CAUSAL: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr
):  # fmt: skip
    """Add what comes from the queries first to end - 1, counted from `queries_from`; for keys without the scale."""
    column = tl.arange(0, WIDTH)
    for block in range(first, end, QUERIES):
        at = block + tl.arange(0, QUERIES)
        inside = at < end
        place = (queries_from + at).to(tl.int64)
        places = (place[:, None] * HEADS + head) * WIDTH + column[None, :]
        # Past the end the output's gradient is 0, and so is its product: such queries add nothing.
        queries = tl.load(query + places, mask=inside[:, None], other=0.0)
        grads = tl.load(grad + places, mask=inside[:, None], other=0.0)
        of_head = head.to(tl.int64) * tokens + place
        log_total = tl.load(lse + of_head, mask=inside, other=0.0) * 1.4426950408889634
        along = tl.load(products + of_head, mask=inside, other=0.0)
        weights = tl.exp2(tl.dot(keys, tl.trans(queries)) * scale - log_total[None, :])
        if CAUSAL:
            weights = tl.where(key_at[:, None] <= at[None, :], weights, 0.0)
        for_values += tl.dot(weights.to(grads.dtype), grads)
        inner = weights * (tl.dot(values, tl.trans(grads)) - along[None, :])
        for_keys += tl.dot(inner.to(queries.dtype), queries)
    return for_keys, for_values


@triton.jit(do_not_specialize=["tokens"])
def _backward_for_keys(
    query, key, value, lse, grad, products, grad_key, grad_value, rows, tokens, scale, factor,
    KV_HEADS: tl.constexpr, SHARE: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr
):  # fmt: skip
    """One program: KEYS keys of one row and key-value head, and the queries of the row and its followers."""
    kv_head, fields = tl.program_id(0), rows + tl.program_id(2) * 6
    first = tl.program_id(1) * KEYS
    start, length = tl.load(fields), tl.load(fields + 1)
    if first >= length:
        return
    at = first + tl.arange(0, KEYS)
    inside = (at < length)[:, None]
    places = ((start + at).to(tl.int64)[:, None] * KV_HEADS + kv_head) * WIDTH + tl.arange(0, WIDTH)[None, :]
    keys = tl.load(key + places, mask=inside, other=0.0)
    values = tl.load(value + places, mask=inside, other=0.0)
    for_keys = tl.zeros((KEYS, WIDTH), tl.float32)
    for_values = tl.zeros((KEYS, WIDTH), tl.float32)
    follower, after = tl.load(fields + 4), tl.load(fields + 5)
    past = tl.minimum(first + KEYS, length)
    for one_of in range(SHARE):
        head = kv_head * SHARE + one_of
        for_keys, for_values = _key_gradients(
            for_keys, for_values, keys, values, at, query, grad, lse, products, tokens, start, first, past, head,
            scale, True, KV_HEADS * SHARE, WIDTH, QUERIES,
        )  # fmt: skip
        for_keys, for_values = _key_gradients(
            for_keys, for_values, keys, values, at, query, grad, lse, products, tokens, start, past, length, head,
            scale, False, KV_HEADS * SHARE, WIDTH, QUERIES,
        )  # fmt: skip
        for_keys, for_values = _key_gradients(
            for_keys, for_values, keys, values, at, query, grad, lse, products, tokens, 0, follower, after, head,
            scale, False, KV_HEADS * SHARE, WIDTH, QUERIES,
        )  # fmt: skip
    kind = grad_key.dtype.element_ty
    tl.store(grad_key + places, (for_keys * factor).to(kind), mask=inside)
    tl.store(grad_value + places, for_values.to(kind), mask=inside)


def attention_forward(query: Tensor, key: Tensor, value: Tensor, rows: Tensor, longest: int, out: Tensor) -> Tensor:
    """Fill `out` [T, H, D] by attention within each row and to its prompt; returns log-sum-exps, float32 [H, T]. All
    contiguous, key and value [T, h, D]; tokens of no row are left alone; `longest` row, without its prompt."""
    tokens, heads, width = query.shape
    kv_heads, tile = key.shape[1], FORWARD
    lse = torch.empty(heads, tokens, dtype=torch.float32, device=query.device)
    _forward[(heads, triton.cdiv(longest, tile.queries), rows.shape[0])](
        query, key, value, out, lse, rows, tokens, width**-0.5 * _LOG2_E,
        KV_HEADS=kv_heads, SHARE=heads // kv_heads, WIDTH=width, QUERIES=tile.queries, KEYS=tile.keys,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return lse


def attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    rows: Tensor,
    longest: int,
    grads: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Fill `grads`, of query, key and value, from the gradient [T, H, D] of `out`."""
    tokens, heads, width = query.shape
    kv_heads = key.shape[1]
    products = torch.empty_like(lse)
    factor = width**-0.5
    shapes = {"KV_HEADS": kv_heads, "SHARE": heads // kv_heads, "WIDTH": width}
    tile = FOR_QUERIES
    _backward_for_queries[(heads, triton.cdiv(longest, tile.queries), rows.shape[0])](
        query, key, value, out, lse, grad, grads[0], products, rows, tokens, factor * _LOG2_E, factor,
        **shapes, QUERIES=tile.queries, KEYS=tile.keys, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    tile = FOR_KEYS
    _backward_for_keys[(kv_heads, triton.cdiv(longest, tile.keys), rows.shape[0])](
        query, key, value, lse, grad, products, grads[1], grads[2], rows, tokens, factor * _LOG2_E, factor,
        **shapes, QUERIES=tile.queries, KEYS=tile.keys, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
