"""Forward pass of a dense decoder-only model against a column-aligned KV cache, written for few kernel launches.

Weights are held fused. Rows of the QKV matrix are grouped by key-value head (its queries, its key, its value), so that
(sequence, key-value head) is one batch dimension, here called a lane. The two halves of every query and key head are
interleaved at load, which turns the rotary embedding into one complex multiplication and changes no score.

Shapes: B rows, T tokens, W cache columns in view, H hidden, D head size, R query heads per key-value head.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

from nemotron_steps.engine.generation.embedded.cached_model import (
    CachedModel,
    CacheView,
    Continuation,
    DeviceView,
    Slot,
)
from nemotron_steps.engine.kernels.fused import linear_forward
from nemotron_steps.errors import EngineError, UnsupportedError
from nemotron_steps.models.architecture import Architecture, cos_sin
from nemotron_steps.models.mapping import HEAD


class CachedDenseModel(CachedModel):
    """Weights and forward pass of a Llama, Qwen2 or Qwen3 dense model, of sequences up to `max_positions`."""

    def __init__(
        self, architecture: Architecture, *, max_positions: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        if architecture.is_moe:
            raise UnsupportedError(
                "the embedded generator has no mixture-of-experts layers",
                expected="a dense llama, qwen2 or qwen3 model",
                found=architecture.family,
                hints=["policy.generation.backend=vllm"],
            )
        super().__init__(architecture, cached_layers=architecture.num_layers, device=device, dtype=dtype)
        a = architecture
        self._scale = a.head_dim**-0.5
        embedding = self._named("model.embed_tokens.weight", a.vocab_size, a.hidden_size)
        self.layers = [self._layer(f"model.layers.{i}.") for i in range(a.num_layers)]
        cos, sin = cos_sin(a, max_positions)
        half = a.head_dim // 2
        self.weights = ModelWeights(
            embedding=embedding,
            head=embedding if a.tied_embeddings else self._named(HEAD, a.vocab_size, a.hidden_size),
            final_norm=self._named("model.norm.weight", a.hidden_size),
            rotations=torch.complex(cos[:, :half], sin[:, :half]).to(device),
            epsilon=torch.tensor(a.norm_eps, device=device, dtype=torch.float32),
            eps=a.norm_eps,
        )

    def _layer(self, prefix: str) -> LayerWeights:
        a, queries, attention = self.architecture, self.queries_per_lane, f"{prefix}self_attn."
        hidden, inner, dim = a.hidden_size, a.ffn_hidden_size, a.head_dim
        gate_up, qk_norm = self._empty(2 * inner, hidden), None
        for part, rows in zip(("gate", "up"), gate_up.chunk(2), strict=True):
            self._slots[f"{prefix}mlp.{part}_proj.weight"] = Slot.whole(rows)
        if a.qk_norm:
            qk_norm = self._empty(queries + 1, dim)
            for part, rows in (("q", qk_norm[:queries]), ("k", qk_norm[queries:])):
                self._slots[f"{attention}{part}_norm.weight"] = Slot((dim,), rows.unsqueeze(-1), interleave=True)
        return LayerWeights(
            input_norm=self._named(f"{prefix}input_layernorm.weight", hidden),
            qkv=self._qkv(attention, "weight", hidden, interleave=True),
            qkv_bias=self._qkv(attention, "bias", interleave=True) if a.qkv_bias else None,
            qk_norm=qk_norm,
            output=self._named(f"{attention}o_proj.weight", hidden, a.num_attention_heads * dim),
            post_norm=self._named(f"{prefix}post_attention_layernorm.weight", hidden),
            gate_up=gate_up,
            down=self._named(f"{prefix}mlp.down_proj.weight", hidden, inner),
        )

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> int:
        """CachedModel.load; where the output layer is tied, one among the weights must be the embedding."""
        tied = dict[str, torch.Tensor]()

        def others() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                if name == HEAD and self.architecture.tied_embeddings:
                    tied[name] = tensor
                else:
                    yield name, tensor

        received = super().load(others())
        for head in tied.values():
            # NaN weights are reported where the logits become NaN.
            embedding = self.weights.embedding
            if not torch.allclose(head.to(embedding), embedding, rtol=0, atol=0, equal_nan=True):
                raise EngineError("the tied output layer differs from the embedding", found=HEAD)
        return received

    def matrices(self) -> list[torch.Tensor]:
        """Weights of products, [outputs, inputs]: four a layer, then the output layer's."""
        of_layers = [w for layer in self.layers for w in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        return [*of_layers, self.weights.head]

    def decode(self, tokens: torch.Tensor, positions: torch.Tensor, cache: CacheView) -> torch.Tensor:
        """CachedModel.decode, operator by operator: any device, any type, any way of sampling."""
        rows, heads, queries, model = tokens.size(0), cache.keys.size(2), self.queries_per_lane, self.weights
        rotation = model.rotations.index_select(0, positions)
        if heads > 1:
            rotation = rotation.repeat_interleave(heads, dim=0)
        rotation = rotation.unsqueeze(1)
        x = model.embedding.index_select(0, tokens)
        for i, layer in enumerate(self.layers):
            qkv = linear_forward(norm(x, layer.input_norm, model), layer.qkv)
            if layer.qkv_bias is not None:
                qkv = qkv.add_(layer.qkv_bias)
            mixed = qkv.view(rows * heads, queries + 2, -1)
            rotated = rotate(mixed.narrow(1, 0, queries + 1), layer.qk_norm, rotation, model)
            x = finish_layer(layer, x, attend(rotated, mixed.select(1, queries + 1), cache, i), model)
        return linear_forward(norm(x, model.final_norm, model), model.head)

    def decode_fused(self, tokens: torch.Tensor, cache: DeviceView) -> torch.Tensor:
        """CachedModel.decode_fused, in ten kernels a layer."""
        from nemotron_steps.engine.generation.embedded.kernels import decode_attention
        from nemotron_steps.engine.kernels.triton_kernels import swiglu_forward

        a = self.architecture
        rotations = torch.view_as_real(self.weights.rotations)
        x = self.weights.embedding.index_select(0, tokens)
        for i, layer in enumerate(self.layers):
            normed = F.rms_norm(x, x.shape[-1:], layer.input_norm, a.norm_eps)
            if layer.qkv_bias is None:
                qkv = torch.mm(normed, layer.qkv.t())
            else:
                qkv = torch.addmm(layer.qkv_bias, normed, layer.qkv.t())
            scales = {"epsilon": a.norm_eps, "scale": self._scale}
            attended = decode_attention(qkv, layer.qk_norm, rotations, cache, layer=i, **scales)
            x.addmm_(attended, layer.output.t())
            gate_up = torch.mm(F.rms_norm(x, x.shape[-1:], layer.post_norm, a.norm_eps), layer.gate_up.t())
            x.addmm_(swiglu_forward(gate_up), layer.down.t())
        return torch.mm(F.rms_norm(x, x.shape[-1:], self.weights.final_norm, a.norm_eps), self.weights.head.t())

    def prefill(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        hidden: torch.Tensor,
        continuation: Continuation,
    ) -> torch.Tensor:
        """CachedModel.prefill"""
        rows, length = tokens.shape
        a, model, queries = self.architecture, self.weights, self.queries_per_lane
        rotation = self.weights.rotations[positions.to(self.device)].view(rows, length, 1, 1, -1)
        bias = (hidden.to(self.device) * (torch.finfo(self.dtype).min / 2)).to(self.dtype).unsqueeze(1)
        x = self.weights.embedding[tokens.to(self.device).view(-1)]
        last_layer = self.layers[-1]
        for layer, layer_keys, layer_values in zip(self.layers, keys.unbind(0), values.unbind(0), strict=True):
            flat = linear_forward(norm(x, layer.input_norm, model), layer.qkv)
            if layer.qkv_bias is not None:
                flat.add_(layer.qkv_bias)
            qkv = flat.view(rows, length, a.num_key_value_heads, queries + 2, a.head_dim)
            qk = rotate(qkv[..., : queries + 1, :], layer.qk_norm, rotation, model)
            layer_keys[:, :, -length:].copy_(qk[..., queries, :].transpose(1, 2))
            layer_values[:, :, -length:].copy_(qkv[..., queries + 1, :].transpose(1, 2))
            q = qk[..., :queries, :]
            if layer is last_layer:  # only the last column's output is read
                q, bias, x = q[:, -1:], bias[:, :, -1:], x.view(rows, length, -1)[:, -1].contiguous()
            attended = F.scaled_dot_product_attention(
                q.reshape(rows, q.shape[1], a.num_attention_heads, a.head_dim).transpose(1, 2),
                layer_keys,
                layer_values,
                attn_mask=bias,
                enable_gqa=queries > 1,
            )
            x = finish_layer(layer, x, attended.transpose(1, 2).reshape(x.shape[0], -1), model)
        return linear_forward(norm(x, self.weights.final_norm, model), self.weights.head).float()


class LayerWeights(NamedTuple):
    """Weights of one layer, fused: qkv [key-value heads * (R + 2) * D, H], qk_norm [R + 1, D]: the query's weight R
    times, then the key's."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    qk_norm: torch.Tensor | None
    output: torch.Tensor
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class ModelWeights(NamedTuple):
    """Everything else a step needs to know of the model: rotations complex64 [positions, D / 2], and the norm's epsilon
    as a float32 scalar and as a number."""

    embedding: torch.Tensor
    head: torch.Tensor
    final_norm: torch.Tensor
    rotations: torch.Tensor
    epsilon: torch.Tensor
    eps: float


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


def attend(qk: torch.Tensor, value: torch.Tensor, cache: CacheView, layer: int) -> torch.Tensor:
    """Write one new key and value a row to the last column, and attend over each row's prefix and window; [B, H]. `qk`
    [lanes, R + 1, D], queries and the key; `value` [lanes, D]."""
    lanes, queries, dim = qk.size(0), qk.size(1) - 1, qk.size(2)
    rows, window = lanes // cache.keys.size(2), cache.column + 1 - cache.first
    keys = cache.keys[layer].narrow(0, 0, rows).flatten(0, 1)
    values = cache.values[layer].narrow(0, 0, rows).flatten(0, 1)
    keys.select(1, cache.column).copy_(qk.select(1, queries))
    values.select(1, cache.column).copy_(value)
    keys, values = keys.narrow(1, cache.first, window).transpose(1, 2), values.narrow(1, cache.first, window)
    near = _scores(qk.narrow(1, 0, queries), keys, cache.bias)
    prefix = cache.prefix
    if prefix is None:
        return torch.bmm(torch.softmax(near, -1).to(values.dtype), values).view(rows, -1)
    # One softmax over prefix and window; only the two matrix products differ in how rows are batched.
    far_keys, far_values = prefix.keys[layer], prefix.values[layer]
    batch, length = far_keys.size(0), far_keys.size(2)
    cells = qk.reshape(-1, dim).index_select(0, prefix.query_of_cell).view(batch, -1, dim)
    far = _scores(cells, far_keys, prefix.bias).view(-1, length)
    far = far.index_select(0, prefix.cell_of_row).view(lanes, queries, length)
    weights = torch.softmax(torch.cat((far, near), -1), -1).to(values.dtype)
    both = weights.size(2)
    attended = torch.bmm(weights.narrow(2, length, both - length), values).view(-1, dim)
    far_weights = weights.view(-1, both).index_select(0, prefix.row_of_cell).view(batch, -1, both)
    from_far = torch.bmm(far_weights.narrow(2, 0, length), far_values).view(-1, dim)
    return attended.add_(from_far.index_select(0, prefix.cell_of_row)).view(rows, -1)


def _scores(query: torch.Tensor, keys: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Scaled, masked scores, float32 whatever the model's dtype."""
    scale = query.size(-1) ** -0.5
    if query.dtype == torch.float32:
        return torch.baddbmm(bias, query, keys, alpha=scale)
    if query.is_cuda:
        return torch.add(bias, torch.bmm(query, keys, out_dtype=torch.float32), alpha=scale)
    return torch.baddbmm(bias, query.float(), keys.float(), alpha=scale)


def norm(x: torch.Tensor, weight: torch.Tensor, model: ModelWeights) -> torch.Tensor:
    """RMSNorm over the last dimension."""
    if x.is_cuda or x.dtype != torch.float32:
        return F.rms_norm(x, [x.size(-1)], None, model.eps) * weight
    # Half the time of F.rms_norm, which on CPU is six operators.
    length = torch.linalg.vector_norm(x, 2.0, [-1], True)
    inverse = torch.addcmul(model.epsilon, length, length, value=1.0 / x.size(-1)).rsqrt_()
    return (x * inverse).mul_(weight)
