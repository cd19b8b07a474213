"""One decoding step of a dense model, operator by operator: any device, any type, any way of sampling.

Not for: what a weight is called (model.py), the faster steps of CUDA (graph.py) and of small models on CPU (native.py),
layers other than attention followed by an MLP (mixers.py).

Shapes: B rows, H hidden, D head size, R query heads per key-value head; a lane is a row's key-value head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from nemotron_steps.engine.generation.embedded.states import RowStates
from nemotron_steps.engine.kernels.linear import linear_forward


class PrefixView(NamedTuple):
    """Prefixes that several rows share, each attended once for up to `m` rows: a grid of P prefixes by m cells.

    Cells are in the order (prefix, key-value head, row of the prefix, query head); lists hold one entry a layer.
    """

    keys: list[torch.Tensor]
    """[P * key-value heads, D, longest prefix]"""
    values: list[torch.Tensor]
    """[P * key-value heads, longest prefix, D]"""
    bias: torch.Tensor
    """Additive mask [P * key-value heads, 1, longest prefix]"""
    query_of_cell: torch.Tensor
    """int64 [cells], index into lanes * (R + 1) queries and keys"""
    row_of_cell: torch.Tensor
    """int64 [cells], index into lanes * R queries"""
    cell_of_row: torch.Tensor
    """int64 [lanes * R], index into cells"""


class CacheView(NamedTuple):
    """The part of the KV cache one decode step reads and writes."""

    keys: torch.Tensor
    """[layers, rows, key-value heads, columns, D], of which the first B rows are in use"""
    values: torch.Tensor
    first: int
    """First column of the window"""
    column: int
    """Its last, that of the tokens being fed"""
    bias: torch.Tensor
    """Additive mask [lanes, 1, window]"""
    prefix: PrefixView | None
    """What comes before each row's window"""
    states: RowStates | None
    """What recurrent layers remember of each row"""


class LayerWeights(NamedTuple):
    """Weights of one layer, fused (model.py)."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    """[key-value heads * (R + 2) * D, H]"""
    qkv_bias: torch.Tensor | None
    qk_norm: torch.Tensor | None
    """[R + 1, D]: the query weight R times, then the key weight"""
    output: torch.Tensor
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class ModelWeights(NamedTuple):
    """Everything else a step needs to know of the model."""

    embedding: torch.Tensor
    head: torch.Tensor
    final_norm: torch.Tensor
    rotations: torch.Tensor
    """complex64 [positions, D / 2]"""
    epsilon: torch.Tensor
    """float32 scalar"""
    eps: float
    """The same"""
    queries: int
    """R"""


def decode_step(
    tokens: torch.Tensor,
    positions: torch.Tensor,
    model: ModelWeights,
    layers: list[LayerWeights],
    cache: CacheView,
) -> torch.Tensor:
    """Feed one token per row and write its keys and values to the last column of the window.

    Args:
        tokens, positions: int64 [B]

    Returns:
        Logits [B, vocabulary] in the model's dtype.
    """
    rows, heads = tokens.size(0), cache.keys.size(2)
    queries, lanes = model.queries, rows * heads
    rotation = model.rotations.index_select(0, positions)
    if heads > 1:
        rotation = rotation.repeat_interleave(heads, dim=0)
    rotation = rotation.unsqueeze(1)
    x = model.embedding.index_select(0, tokens)
    for i, layer in enumerate(layers):
        keys = cache.keys[i].narrow(0, 0, rows).flatten(0, 1)
        values = cache.values[i].narrow(0, 0, rows).flatten(0, 1)
        qkv = linear_forward(norm(x, layer.input_norm, model), layer.qkv)
        qkv_bias = layer.qkv_bias
        if qkv_bias is not None:
            qkv = qkv.add_(qkv_bias)
        mixed = qkv.view(lanes, queries + 2, -1)
        rotated = rotate(mixed.narrow(1, 0, queries + 1), layer.qk_norm, rotation, model)
        keys.select(1, cache.column).copy_(rotated.select(1, queries))
        values.select(1, cache.column).copy_(mixed.select(1, queries + 1))
        window = cache.column + 1 - cache.first
        keys, values = keys.narrow(1, cache.first, window).transpose(1, 2), values.narrow(1, cache.first, window)
        attended = attend(rotated, keys, values, cache.bias, cache.prefix, i)
        x = finish_layer(layer, x, attended.view(rows, -1), model)
    return linear_forward(norm(x, model.final_norm, model), model.head)


def rotate(qk: torch.Tensor, qk_norm: torch.Tensor | None, rotation: torch.Tensor, model: ModelWeights) -> torch.Tensor:
    """QK-norm where the family has it, then the rotary embedding; [..., R + 1, D] in and out."""
    if qk_norm is not None:
        qk = norm(qk, qk_norm, model)
    pairs = torch.view_as_complex(qk.float().unflatten(-1, [-1, 2]))  # type: ignore[no-untyped-call]
    return torch.view_as_real(pairs * rotation).flatten(-2).to(qk.dtype)


def finish_layer(layer: LayerWeights, x: torch.Tensor, attended: torch.Tensor, model: ModelWeights) -> torch.Tensor:
    """x [B, H] with output projection and MLP added."""
    x = linear_forward(attended, layer.output, plus=x)
    gate_up = linear_forward(norm(x, layer.post_norm, model), layer.gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return linear_forward(F.silu(gate).mul_(up), layer.down, plus=x)


def attend(
    rotated: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor,
    prefix: PrefixView | None,
    layer: int,
) -> torch.Tensor:
    """Attention of one new token a row over its prefix and its window; [lanes, R, D].

    Args:
        rotated: [lanes, R + 1, D], queries and the key.
        keys: [lanes, D, window].
        values: [lanes, window, D].
    """
    lanes, queries, dim = rotated.size(0), rotated.size(1) - 1, rotated.size(2)
    near = _scores(rotated.narrow(1, 0, queries), keys, bias)
    if prefix is None:
        return torch.bmm(_softmax(near, values.dtype), values)
    # One softmax over prefix and window; only the two matrix products differ in how rows are batched.
    far_keys, far_values = prefix.keys[layer], prefix.values[layer]
    batch, length = far_keys.size(0), far_keys.size(2)
    cells = rotated.view(-1, dim).index_select(0, prefix.query_of_cell).view(batch, -1, dim)
    far = _scores(cells, far_keys, prefix.bias).view(-1, length)
    far = far.index_select(0, prefix.cell_of_row).view(lanes, queries, length)
    weights = _softmax(torch.cat((far, near), -1), values.dtype)
    both = weights.size(2)
    attended = torch.bmm(weights.narrow(2, length, both - length), values).view(-1, dim)
    far_weights = weights.view(-1, both).index_select(0, prefix.row_of_cell).view(batch, -1, both)
    from_far = torch.bmm(far_weights.narrow(2, 0, length), far_values).view(-1, dim)
    return attended.add_(from_far.index_select(0, prefix.cell_of_row))


def _scores(query: torch.Tensor, keys: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Scaled, masked scores, float32 whatever the model's dtype."""
    scale = query.size(-1) ** -0.5
    if query.dtype == torch.float32:
        return torch.baddbmm(bias, query, keys, alpha=scale)
    if query.is_cuda:
        return torch.add(bias, torch.bmm(query, keys, out_dtype=torch.float32), alpha=scale)
    return torch.baddbmm(bias, query.float(), keys.float(), alpha=scale)


def _softmax(scores: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.softmax(scores, -1).to(dtype)


def norm(x: torch.Tensor, weight: torch.Tensor, model: ModelWeights) -> torch.Tensor:
    """RMSNorm over the last dimension."""
    if x.is_cuda or x.dtype != torch.float32:
        return F.rms_norm(x, [x.size(-1)], None, model.eps) * weight
    # Half the time of F.rms_norm, which on CPU is six operators.
    length = torch.linalg.vector_norm(x, 2.0, [-1], True)
    inverse = torch.addcmul(model.epsilon, length, length, value=1.0 / x.size(-1)).rsqrt_()
    return (x * inverse).mul_(weight)
