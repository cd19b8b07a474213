"""Forward pass of a dense decoder-only model against a column-aligned KV cache, written for few kernel launches.

Weights come under Hugging Face names and are held fused: one matrix for Q, K and V, one for gate and up. Decoding a
tiny model is bound by the number of operators, so the layout is chosen to save them:

- Rows of the QKV matrix are grouped by key-value head (its queries, its key, its value), so queries, keys and values
  of all sequences are strided views, and (sequence, key-value head) is one batch dimension, here called a lane.
- The two halves of every query and key head are interleaved at load, which turns the rotary embedding into one complex
  multiplication. Scores do not change: queries and keys are permuted alike.
- Every sequence ends in the same cache column, so the new keys of a step are one slice and need no scatter.

Not for: training (no gradient), scheduling or sampling (embedded.py).

Shapes: B rows, T tokens, W cache columns in view, H hidden, D head size, R query heads per key-value head.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from nemotron_steps.engine.dense import product
from nemotron_steps.errors import EngineError, UnsupportedError
from nemotron_steps.models.architecture import Architecture
from nemotron_steps.models.rope import cos_sin


@dataclass
class PrefixView:
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


@dataclass
class CacheView:
    """The part of the KV cache one decode step reads and writes; lists hold one entry a layer.

    The last column of the window is that of the tokens being fed.
    """

    keys: list[torch.Tensor]
    """[lanes, D, W]"""
    values: list[torch.Tensor]
    """[lanes, W, D]"""
    new_keys: list[torch.Tensor]
    """[lanes, D]: the last column"""
    new_values: list[torch.Tensor]
    bias: torch.Tensor
    """Additive mask [lanes, 1, W]"""
    prefix: PrefixView | None = None
    """What comes before each row's window"""


@dataclass
class _Layer:
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

    def __post_init__(self) -> None:
        # Made once: at these sizes even a transposed view costs a measurable part of the product it feeds.
        self.qkv_t, self.output_t = self.qkv.t(), self.output.t()
        self.gate_up_t, self.down_t = self.gate_up.t(), self.down.t()


@dataclass
class _Slot:
    """Where one named weight goes: the shape it must have, and the view of a fused matrix it is copied into."""

    shape: tuple[int, ...]
    view: torch.Tensor
    """[..., D, X] for head-wise weights, else of `shape`"""
    interleave: bool = False

    def write(self, source: torch.Tensor) -> None:
        heads = source.reshape(-1, *self.view.shape[1:])  # a norm weight becomes one head, copied to all
        if self.interleave:
            half = self.view.shape[-2] // 2
            halves = heads.reshape(*heads.shape[:-2], 2, half, heads.shape[-1])
            self.view.view(*self.view.shape[:-2], half, 2, -1).copy_(halves.transpose(-2, -3))
        else:
            self.view.copy_(heads)


class _Scratch:
    """Buffers of one decode step, reused by every layer and step, and the views of them that a layer needs."""

    def __init__(self, model: EmbeddedModel, rows: int) -> None:
        a, queries = model.architecture, model.queries_per_lane

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, device=model.device, dtype=model.dtype)

        lanes = rows * a.num_key_value_heads
        self.rows, self.lanes = rows, lanes
        self.normed = empty(rows, a.hidden_size)
        self.normed_qk = empty(lanes, queries + 1, a.head_dim)
        self.rotated = empty(lanes, queries + 1, a.head_dim)
        self.query, self.key = self.rotated[:, :queries], self.rotated[:, queries]
        if model.dtype == torch.float32:
            self.pairs, self.rotated_pairs = _pairs(self.normed_qk), _pairs(self.rotated)
        self.heads = self.rotated.view(-1, a.head_dim)


class EmbeddedModel:
    """Weights and forward pass of a Llama, Qwen2 or Qwen3 dense model.

    Args:
        max_positions: longest sequence that will ever be fed.
    """

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
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise UnsupportedError(
                "the embedded generator computes in 32 or 16 bits",
                expected="float32, bfloat16 or float16",
                found=str(dtype),
                hints=["policy.precision=float32"],
            )
        self.architecture = a = architecture
        self.queries_per_lane = a.query_heads_per_group
        self.device, self.dtype = device, dtype
        # Finite, so that padding, for which everything is masked, stays finite too.
        self.masked = torch.finfo(torch.float32).min / 2
        self._scale = a.head_dim**-0.5
        self._exact = dtype == torch.float32

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, device=device, dtype=dtype)

        fused = a.num_key_value_heads * (self.queries_per_lane + 2) * a.head_dim
        self._embedding = empty(a.vocab_size, a.hidden_size)
        self._head = self._embedding if a.tied_embeddings else empty(a.vocab_size, a.hidden_size)
        self._final_norm = empty(a.hidden_size)
        self._layers = [
            _Layer(
                input_norm=empty(a.hidden_size),
                qkv=empty(fused, a.hidden_size),
                qkv_bias=empty(fused) if a.qkv_bias else None,
                qk_norm=empty(self.queries_per_lane + 1, a.head_dim) if a.qk_norm else None,
                output=empty(a.hidden_size, a.num_attention_heads * a.head_dim),
                post_norm=empty(a.hidden_size),
                gate_up=empty(2 * a.ffn_hidden_size, a.hidden_size),
                down=empty(a.hidden_size, a.ffn_hidden_size),
            )
            for _ in range(a.num_layers)
        ]
        self._head_t = self._head.t()
        self._slots = self._name_slots()
        self._scratch: _Scratch | None = None
        cos, sin = cos_sin(a, max_positions)
        half = a.head_dim // 2
        self._rotations = torch.complex(cos[:, :half], sin[:, :half]).to(device)
        """complex64 [positions, D / 2]"""
        self._epsilon = torch.tensor(a.norm_eps, device=device, dtype=torch.float32)

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> int:
        """Copy a complete set of Hugging Face-named weights in place; return the bytes received.

        Raises:
            EngineError: a name is unknown or missing, or a shape is wrong. Weights may then be partly replaced.
        """
        missing = set(self._slots)
        received = 0
        for name, tensor in weights:
            received += tensor.numel() * tensor.element_size()
            if name == "lm_head.weight" and self.architecture.tied_embeddings:
                continue
            slot = self._slots.get(name)
            if slot is None:
                raise EngineError("a weight has a name that this architecture lacks", found=name)
            if tuple(tensor.shape) != slot.shape:
                raise EngineError(
                    "a weight has the wrong shape", where=name, expected=str(slot.shape), found=str(tuple(tensor.shape))
                )
            slot.write(tensor.detach())
            missing.discard(name)
        if missing:
            raise EngineError(
                "weights are missing",
                expected=f"all {len(self._slots)} of them",
                found=f"{len(missing)} missing: {', '.join(sorted(missing)[:4])}",
            )
        return received

    def _name_slots(self) -> dict[str, _Slot]:
        a, queries = self.architecture, self.queries_per_lane
        kv_heads, dim = a.num_key_value_heads, a.head_dim

        def whole(tensor: torch.Tensor) -> _Slot:
            return _Slot(tuple(tensor.shape), tensor)

        slots = {"model.embed_tokens.weight": whole(self._embedding), "model.norm.weight": whole(self._final_norm)}
        if not a.tied_embeddings:
            slots["lm_head.weight"] = whole(self._head)
        for i, layer in enumerate(self._layers):
            prefix = f"model.layers.{i}."
            gate, up = layer.gate_up.chunk(2)
            slots |= {
                prefix + "input_layernorm.weight": whole(layer.input_norm),
                prefix + "post_attention_layernorm.weight": whole(layer.post_norm),
                prefix + "self_attn.o_proj.weight": whole(layer.output),
                prefix + "mlp.gate_proj.weight": whole(gate),
                prefix + "mlp.up_proj.weight": whole(up),
                prefix + "mlp.down_proj.weight": whole(layer.down),
            }
            for kind, fused in (("weight", layer.qkv), ("bias", layer.qkv_bias)):
                if fused is None:
                    continue
                heads = fused.view(kv_heads, queries + 2, dim, -1)
                tail = tuple(fused.shape[1:])
                parts = (
                    ("q_proj", heads[:, :queries], kv_heads * queries, True),
                    ("k_proj", heads[:, queries], kv_heads, True),
                    ("v_proj", heads[:, queries + 1], kv_heads, False),
                )
                for part, view, count, interleave in parts:
                    slots[f"{prefix}self_attn.{part}.{kind}"] = _Slot((count * dim, *tail), view, interleave)
            if layer.qk_norm is not None:
                norm = layer.qk_norm.unsqueeze(-1)
                slots[prefix + "self_attn.q_norm.weight"] = _Slot((dim,), norm[:queries], interleave=True)
                slots[prefix + "self_attn.k_norm.weight"] = _Slot((dim,), norm[queries:], interleave=True)
        return slots

    def new_cache(self, rows: int, columns: int) -> torch.Tensor:
        """Keys or values of `rows` sequences, [layers, rows, key-value heads, columns, D].

        Zeros, because what the mask hides still meets a weight of 0, and 0 times NaN is NaN.
        """
        a = self.architecture
        shape = (a.num_layers, rows, a.num_key_value_heads, columns, a.head_dim)
        return torch.zeros(shape, device=self.device, dtype=self.dtype)

    def decode(self, tokens: torch.Tensor, positions: torch.Tensor, cache: CacheView) -> torch.Tensor:
        """Feed one token per row and write its keys and values to the last column of the window.

        Args:
            tokens, positions: int64 [B]

        Returns:
            Logits [B, vocabulary] in the model's dtype.
        """
        rows, lanes_per_row = tokens.shape[0], self.architecture.num_key_value_heads
        scratch = self._scratch
        if scratch is None or scratch.rows != rows:
            scratch = self._scratch = _Scratch(self, rows)
        rotation = self._rotations.index_select(0, positions)
        if lanes_per_row > 1:
            rotation = rotation.repeat_interleave(lanes_per_row, dim=0)
        rotation = rotation.unsqueeze(1)
        x = self._embedding.index_select(0, tokens)
        for i, layer in enumerate(self._layers):
            heads = self._qkv(layer, x, scratch.normed).view(scratch.lanes, self.queries_per_lane + 2, -1)
            self._rotate_into(layer, heads[:, :-1], rotation, scratch)
            cache.new_keys[i].copy_(scratch.key)
            cache.new_values[i].copy_(heads[:, -1])
            attended = self._attend(scratch, cache, i)
            x = self._finish_layer(layer, x, attended.view(rows, -1), scratch.normed)
        return product(self._norm(x, self._final_norm, scratch.normed), self._head)

    def decode_fused(
        self,
        tokens: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        column: torch.Tensor,
        row_state: torch.Tensor,
        prefixes: torch.Tensor,
    ) -> torch.Tensor:
        """`decode` for CUDA, in eight kernels a layer that depend on no number the host knows.

        Args:
            tokens: int64 [B], of rows 0 to B - 1.
            keys, values: [layers, rows, key-value heads, columns, D]
            column, row_state, prefixes: embedded_kernels.decode_attention

        Returns:
            Logits [B, vocabulary] in the model's dtype.
        """
        from nemotron_steps.engine.generation.embedded_kernels import decode_attention
        from nemotron_steps.engine.policy.triton_kernels import swiglu_forward

        a = self.architecture
        rotations = torch.view_as_real(self._rotations)
        x = self._embedding.index_select(0, tokens)
        for i, layer in enumerate(self._layers):
            normed = F.rms_norm(x, x.shape[-1:], layer.input_norm, a.norm_eps)
            if layer.qkv_bias is None:
                qkv = torch.mm(normed, layer.qkv_t)
            else:
                qkv = torch.addmm(layer.qkv_bias, normed, layer.qkv_t)
            attended = decode_attention(
                *(qkv, layer.qk_norm, rotations, keys[i], values[i], column, row_state, prefixes),
                layer=i,
                epsilon=a.norm_eps,
                scale=self._scale,
            )
            x.addmm_(attended, layer.output_t)
            gate_up = torch.mm(F.rms_norm(x, x.shape[-1:], layer.post_norm, a.norm_eps), layer.gate_up_t)
            x.addmm_(swiglu_forward(gate_up), layer.down_t)
        return torch.mm(F.rms_norm(x, x.shape[-1:], self._final_norm, a.norm_eps), self._head_t)

    def _attend(self, scratch: _Scratch, cache: CacheView, layer: int) -> torch.Tensor:
        """Attention of one new token a row over its prefix and its window; [lanes, R, D]."""
        keys, values, prefix = cache.keys[layer], cache.values[layer], cache.prefix
        near = self._scores(scratch.query, keys, cache.bias)
        if prefix is None:
            return torch.bmm(self._softmax(near), values)
        # One softmax over prefix and window; only the two matrix products differ in how rows are batched.
        far_keys, far_values = prefix.keys[layer], prefix.values[layer]
        batch, dim, length = far_keys.shape
        lanes, queries, window = near.shape
        cells = scratch.heads.index_select(0, prefix.query_of_cell).view(batch, -1, dim)
        far = self._scores(cells, far_keys, prefix.bias).view(-1, length)
        scores = torch.cat((far.index_select(0, prefix.cell_of_row).view(lanes, queries, length), near), -1)
        weights = self._softmax(scores)
        attended = torch.bmm(weights[..., length:], values).view(-1, dim)
        far_weights = weights.view(-1, length + window).index_select(0, prefix.row_of_cell)
        far = torch.bmm(far_weights.view(batch, -1, length + window)[..., :length], far_values).view(-1, dim)
        return attended.add_(far.index_select(0, prefix.cell_of_row))

    def _scores(self, query: torch.Tensor, keys: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """Scaled, masked scores, float32 whatever the model's dtype."""
        if self._exact:
            return torch.baddbmm(bias, query, keys, alpha=self._scale)
        if query.is_cuda:
            return torch.add(bias, torch.bmm(query, keys, out_dtype=torch.float32), alpha=self._scale)
        return torch.baddbmm(bias, query.float(), keys.float(), alpha=self._scale)

    def _softmax(self, scores: torch.Tensor) -> torch.Tensor:
        weights = torch.softmax(scores, -1)
        return weights if self._exact else weights.to(self.dtype)

    def prefill(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        hidden: torch.Tensor,
    ) -> torch.Tensor:
        """Feed T tokens per row, left-padded, and write their keys and values to the last T columns of the cache.

        Args:
            tokens, positions: int64 [B, T]
            keys, values: [layers, B, key-value heads, W, D]
            hidden: bool [B, T, W], True where a token must not look.

        Returns:
            float32 logits [B, vocabulary] of the last column.
        """
        rows, length = tokens.shape
        a, queries = self.architecture, self.queries_per_lane
        rotation = self._rotations[positions.to(self.device)].view(rows, length, 1, 1, -1)
        bias = (hidden.to(self.device) * (torch.finfo(self.dtype).min / 2)).to(self.dtype).unsqueeze(1)
        x = self._embedding[tokens.to(self.device).view(-1)]
        last_layer = self._layers[-1]
        for layer, layer_keys, layer_values in zip(self._layers, keys.unbind(0), values.unbind(0), strict=True):
            qkv = self._qkv(layer, x).view(rows, length, a.num_key_value_heads, queries + 2, a.head_dim)
            qk = self._rotate(layer, qkv[..., : queries + 1, :], rotation)
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
            x = self._finish_layer(layer, x, attended.transpose(1, 2).reshape(x.shape[0], -1))
        return product(self._norm(x, self._final_norm), self._head).float()

    # The pieces of a layer. Buffers for the normed states are given by decode, which reuses them.

    def _qkv(self, layer: _Layer, x: torch.Tensor, normed: torch.Tensor | None = None) -> torch.Tensor:
        normed = self._norm(x, layer.input_norm, normed)
        qkv = product(normed, layer.qkv)
        return qkv if layer.qkv_bias is None else qkv.add_(layer.qkv_bias)

    def _rotate(self, layer: _Layer, qk: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        """QK-norm where the family has it, then the rotary embedding; [..., R + 1, D] in and out."""
        if layer.qk_norm is not None:
            qk = self._norm(qk, layer.qk_norm)
        return torch.view_as_real(_pairs(qk.float()) * rotation).flatten(-2).to(self.dtype)

    def _rotate_into(self, layer: _Layer, qk: torch.Tensor, rotation: torch.Tensor, scratch: _Scratch) -> None:
        """`_rotate` to scratch.rotated."""
        if self.dtype != torch.float32:
            scratch.rotated.copy_(self._rotate(layer, qk, rotation))
            return
        if layer.qk_norm is None:
            pairs = _pairs(qk)
        else:
            self._norm(qk, layer.qk_norm, scratch.normed_qk)
            pairs = scratch.pairs
        torch.mul(pairs, rotation, out=scratch.rotated_pairs)

    def _finish_layer(
        self, layer: _Layer, x: torch.Tensor, attended: torch.Tensor, normed: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x with output projection and MLP added."""
        x = product(attended, layer.output, plus=x)
        gate, up = product(self._norm(x, layer.post_norm, normed), layer.gate_up).chunk(2, dim=-1)
        return product(F.silu(gate).mul_(up), layer.down, plus=x)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if x.is_cuda or not self._exact:
            return torch.mul(F.rms_norm(x, x.shape[-1:], eps=self.architecture.norm_eps), weight, out=out)
        # Half the time of F.rms_norm, which on CPU is six operators.
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse = torch.addcmul(self._epsilon, length, length, value=1.0 / x.shape[-1]).rsqrt_()
        return torch.mul(x, inverse, out=out).mul_(weight)


def _pairs(heads: torch.Tensor) -> torch.Tensor:
    """float32 [..., D] as complex64 [..., D / 2], sharing memory."""
    return torch.view_as_complex(heads.view(*heads.shape[:-1], -1, 2))
