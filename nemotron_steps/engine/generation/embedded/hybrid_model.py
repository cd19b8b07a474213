"""A hybrid model (Nemotron-H): layers of one mixer each, keys and values for attention, states for Mamba-2.

Prompts are fed as flat tokens, without padding, which would cost experts work and must not touch a state; attention
alone pads, to read the cache. Attention knows no positions: the state tells what came before.

Not for: what a layer computes for one new token (hybrid_layers.py).

Shapes: n flat tokens, B rows, T tokens and W cache columns in view, D head size, R query heads per key-value head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from nemotron_steps.engine.generation.embedded.cached_model import (
    CachedModel,
    CacheView,
    Continuation,
    DeviceView,
    LayerStates,
    RowStates,
    Slot,
    States,
)
from nemotron_steps.engine.generation.embedded.dense_model import ModelWeights, attend
from nemotron_steps.engine.generation.embedded.hybrid_layers import (
    AttentionWeights,
    ExpertWeights,
    MambaWeights,
    MlpWeights,
    Weights,
    experts,
    gated_output,
    layer_norm,
    mamba_step,
    mamba_step_on_device,
    mlp,
)
from nemotron_steps.engine.kernels.linear import linear_forward
from nemotron_steps.engine.policy.mamba.scan import conv, last_window, scan, time_steps
from nemotron_steps.engine.policy.mamba.segments import Runs
from nemotron_steps.models.architecture import Architecture, Mamba2


class _Cells(NamedTuple):
    """Where flat tokens lie in a padded batch [B, T], on the device."""

    row: torch.Tensor
    """int64 [n], as the next two"""
    place: torch.Tensor
    """0 to T - 1"""
    column: torch.Tensor
    """Of the cache"""
    last: torch.Tensor
    """int64 [B], each row's last flat token"""


class CachedHybridModel(CachedModel):
    """Weights and forward pass of a Nemotron-H model."""

    UNUSED = ("mtp.",)

    def __init__(self, architecture: Architecture, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(architecture, cached_layers=architecture.pattern.count("*"), device=device, dtype=dtype)
        a = architecture
        self._scale = a.head_dim**-0.5
        make: dict[str, Callable[[str, torch.Tensor], Weights]] = {
            "M": self._mamba,
            "*": self._attention,
            "-": self._mlp,
            "E": self._experts,
        }
        hidden = a.hidden_size
        self.weights = ModelWeights(
            embedding=self._empty(a.vocab_size, hidden),
            head=self._empty(a.vocab_size, hidden),
            final_norm=self._empty(hidden),
            rotations=torch.ones((1, a.head_dim // 2), device=device, dtype=torch.complex64),
            epsilon=torch.tensor(a.norm_eps, device=device, dtype=torch.float32),
            eps=a.norm_eps,
        )
        self._slots = {
            "backbone.embeddings.weight": Slot.whole(self.weights.embedding),
            "backbone.norm_f.weight": Slot.whole(self.weights.final_norm),
            "lm_head.weight": Slot.whole(self.weights.head),
        }
        self.layers: list[Weights] = [
            make[kind](f"backbone.layers.{i}.", self._named(f"backbone.layers.{i}.norm.weight", hidden))
            for i, kind in enumerate(a.pattern)
        ]

    # ---- weights

    def _named(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A weight that is kept as it comes."""
        weight = torch.empty(shape, device=self.device, dtype=dtype or self.dtype)
        self._slots[name] = Slot.whole(weight)
        return weight

    def _mamba(self, prefix: str, norm: torch.Tensor) -> MambaWeights:
        a, m = self.architecture, self.architecture.mamba
        assert m is not None
        prefix += "mixer."
        conv = self._empty(m.conv_kernel, m.conv_channels)
        self._slots[prefix + "conv1d.weight"] = Slot((m.conv_channels, 1, m.conv_kernel), conv.t().unsqueeze(1))
        bias = torch.zeros(m.conv_channels, device=self.device, dtype=self.dtype)
        if m.conv_bias:
            self._slots[prefix + "conv1d.bias"] = Slot.whole(bias)
        dt_bias, a_log, d = (
            self._named(prefix + name, m.num_heads, dtype=torch.float32) for name in ("dt_bias", "A_log", "D")
        )
        gated_norm = self._empty(m.num_groups, m.inner_size // m.num_groups)
        self._slots[prefix + "norm.weight"] = Slot((m.inner_size,), gated_norm)
        return MambaWeights(
            norm=norm,
            in_proj=self._named(prefix + "in_proj.weight", m.in_proj_rows, a.hidden_size),
            conv=conv,
            conv_bias=bias,
            dt_bias=dt_bias,
            A_log=a_log,
            A=torch.empty_like(a_log),
            D=d,
            gated_norm=gated_norm,
            out_proj=self._named(prefix + "out_proj.weight", a.hidden_size, m.inner_size),
        )

    def _attention(self, prefix: str, norm: torch.Tensor) -> AttentionWeights:
        a, queries = self.architecture, self.queries_per_lane
        lanes, dim, hidden = a.num_key_value_heads, a.head_dim, a.hidden_size
        prefix += "mixer."
        qkv = self._empty(lanes * (queries + 2) * dim, hidden)
        heads = qkv.view(lanes, queries + 2, dim, hidden)
        self._slots |= {
            prefix + "q_proj.weight": Slot((lanes * queries * dim, hidden), heads[:, :queries]),
            prefix + "k_proj.weight": Slot((lanes * dim, hidden), heads[:, queries]),
            prefix + "v_proj.weight": Slot((lanes * dim, hidden), heads[:, queries + 1]),
        }
        return AttentionWeights(norm, qkv, self._named(prefix + "o_proj.weight", hidden, lanes * queries * dim))

    def _mlp(self, prefix: str, norm: torch.Tensor) -> MlpWeights:
        a = self.architecture
        return MlpWeights(
            norm,
            up=self._named(prefix + "mixer.up_proj.weight", a.ffn_hidden_size, a.hidden_size),
            down=self._named(prefix + "mixer.down_proj.weight", a.hidden_size, a.ffn_hidden_size),
        )

    def _experts(self, prefix: str, norm: torch.Tensor) -> ExpertWeights:
        a = self.architecture
        prefix += "mixer."
        hidden, inner, shared, latent = (
            a.hidden_size, a.moe_ffn_hidden_size, a.shared_ffn_hidden_size, a.moe_latent_size
        )  # fmt: skip
        width = latent or hidden
        up, down = self._empty(a.num_experts * inner, width), self._empty(width, a.num_experts * inner)
        for expert in range(a.num_experts):
            rows = slice(expert * inner, (expert + 1) * inner)
            self._slots[f"{prefix}experts.{expert}.up_proj.weight"] = Slot.whole(up[rows])
            self._slots[f"{prefix}experts.{expert}.down_proj.weight"] = Slot.whole(down[:, rows])
        return ExpertWeights(
            norm=norm,
            router=self._named(prefix + "gate.weight", a.num_experts, hidden, dtype=torch.float32),
            router_bias=self._named(prefix + "gate.e_score_correction_bias", a.num_experts, dtype=torch.float32),
            up=up,
            down=down,
            shared_up=self._named(prefix + "shared_experts.up_proj.weight", shared, hidden) if shared else None,
            shared_down=self._named(prefix + "shared_experts.down_proj.weight", hidden, shared) if shared else None,
            into_latent=self._named(prefix + "fc1_latent_proj.weight", latent, hidden) if latent else None,
            from_latent=self._named(prefix + "fc2_latent_proj.weight", hidden, latent) if latent else None,
        )

    def load(self, weights: Iterable[tuple[str, torch.Tensor]], *, some: bool = False) -> int:
        """CachedModel.load; experts one by one, as on the hub. What multi-token prediction has is left aside."""
        received = super().load(weights, some=some)
        for layer in self.layers:
            if isinstance(layer, MambaWeights):
                layer.A.copy_(-layer.A_log.exp())
        return received

    # ---- states

    def _ssm(self, rows: int) -> torch.Tensor:
        m = self.architecture.mamba
        assert m is not None
        shape = (self.architecture.pattern.count("M"), rows, m.num_groups, m.state_size, m.inner_size // m.num_groups)
        return torch.zeros(shape, device=self.device, dtype=torch.float32)

    def new_states(self, rows: int) -> States | None:
        """CachedModel.new_states"""
        m = self.architecture.mamba
        if m is None:
            return None
        ssm = self._ssm(rows)
        window = torch.zeros(
            (ssm.shape[0], rows, m.conv_kernel - 1, m.conv_channels), device=self.device, dtype=self.dtype
        )
        return States(ssm, window)

    def new_row_states(self, rows: int) -> RowStates | None:
        """CachedModel.new_row_states"""
        m = self.architecture.mamba
        if m is None:
            return None
        ssm = self._ssm(rows)
        inputs = torch.zeros((ssm.shape[0], m.conv_kernel, rows, m.conv_channels), device=self.device, dtype=self.dtype)
        return RowStates(ssm, inputs)

    # ---- one token a row

    def decode(self, tokens: torch.Tensor, positions: torch.Tensor, cache: CacheView) -> torch.Tensor:
        """CachedModel.decode; positions are of no use. Moves the states on by one token."""
        states, queries = cache.states, self.queries_per_lane

        def mamba(x: torch.Tensor, layer: MambaWeights, a: Mamba2, own: LayerStates) -> torch.Tensor:
            assert states is not None
            return mamba_step(x, layer, a, self.weights, own, states.newest)

        def attention(qkv: torch.Tensor, index: int) -> torch.Tensor:
            qkv = qkv.view(qkv.size(0) * cache.keys.size(2), queries + 2, -1)
            return attend(qkv.narrow(1, 0, queries + 1), qkv.select(1, queries + 1), cache, index)

        logits = self._step(tokens, states, mamba, attention)
        if states is not None:
            states.advance()
        return logits

    def decode_fused(self, tokens: torch.Tensor, cache: DeviceView) -> torch.Tensor:
        """CachedModel.decode_fused"""
        from nemotron_steps.engine.generation.embedded.kernels import decode_attention

        rotations, epsilon = torch.view_as_real(self.weights.rotations), self.architecture.norm_eps

        def mamba(x: torch.Tensor, layer: MambaWeights, a: Mamba2, own: LayerStates) -> torch.Tensor:
            assert cache.states is not None
            return mamba_step_on_device(x, layer, a, self.weights, own, cache.states.place)

        def attention(qkv: torch.Tensor, index: int) -> torch.Tensor:
            return decode_attention(qkv, None, rotations, cache, layer=index, epsilon=epsilon, scale=self._scale)

        return self._step(tokens, cache.states, mamba, attention)

    def _step(
        self,
        tokens: torch.Tensor,
        states: RowStates | None,
        mamba: Callable[[torch.Tensor, MambaWeights, Mamba2, LayerStates], torch.Tensor],
        attention: Callable[[torch.Tensor, int], torch.Tensor],
    ) -> torch.Tensor:
        """Feed one token a row. `attention`: of projected queries, keys and values, by the layer's place in the
        cache."""
        a, model = self.architecture, self.weights
        layer_states = iter(() if states is None else states.layers(tokens.size(0)))
        x = model.embedding.index_select(0, tokens)
        index = 0
        for layer in self.layers:
            if isinstance(layer, MambaWeights):
                assert a.mamba is not None
                x = mamba(x, layer, a.mamba, next(layer_states))
            elif isinstance(layer, ExpertWeights):
                x = experts(x, layer, a, model, record=self.chosen)
            elif isinstance(layer, MlpWeights):
                x = mlp(x, layer, model)
            else:
                qkv = linear_forward(layer_norm(x, layer.norm, model), layer.qkv)
                x = linear_forward(attention(qkv, index), layer.output, plus=x)
                index += 1
        return linear_forward(layer_norm(x, model.final_norm, model), model.head)

    # ---- prompts

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
        a, model = self.architecture, self.weights
        lengths, states = continuation
        cells = self._cells(lengths, tokens.shape[1], keys.shape[3])
        runs = Runs(lengths, device=self.device)
        bias = (hidden.to(self.device) * (torch.finfo(self.dtype).min / 2)).to(self.dtype).unsqueeze(1)
        x = model.embedding[tokens.to(self.device)[cells.row, cells.place]]
        attention = mamba = 0
        for i, layer in enumerate(self.layers):
            if i == len(self.layers) - 1 and isinstance(layer, MlpWeights | ExpertWeights) and self.chosen is None:
                x = x.index_select(0, cells.last)  # only the last tokens' outputs are read, unless choices are as well
            if isinstance(layer, MambaWeights):
                assert states is not None
                x = self._mamba_prefill(x, layer, runs, states, mamba)
                mamba += 1
            elif isinstance(layer, ExpertWeights):
                x = experts(x, layer, a, model, every=False, record=self.chosen)
            elif isinstance(layer, MlpWeights):
                x = mlp(x, layer, model)
            else:
                x = self._attention_prefill(x, layer, cells, bias, keys[attention], values[attention])
                attention += 1
        if x.shape[0] > len(lengths):
            x = x.index_select(0, cells.last)
        return linear_forward(layer_norm(x, model.final_norm, model), model.head).float()

    def _cells(self, lengths: list[int], width: int, columns: int) -> _Cells:
        counts = np.array(lengths)
        row, place = (np.arange(width) >= width - counts[:, None]).nonzero()
        return _Cells(
            *(torch.from_numpy(i).to(self.device) for i in (row, place, place + columns - width, counts.cumsum() - 1))
        )

    def _mamba_prefill(
        self, x: torch.Tensor, layer: MambaWeights, runs: Runs, states: States, index: int
    ) -> torch.Tensor:
        """x [n, H] with the layer added, which goes on from its states and leaves those after the last tokens."""
        m = self.architecture.mamba
        assert m is not None
        rows, heads, groups, inner = len(runs.lengths), m.num_heads, m.num_groups, m.inner_size
        projected = linear_forward(layer_norm(x, layer.norm, self.weights), layer.in_proj)
        gate, channels, raw = torch.split(projected, [inner, m.conv_channels, heads], -1)
        window = states.window[index].transpose(1, 2)
        convolved = conv(channels, layer.conv.t().contiguous().unsqueeze(1), layer.conv_bias, runs, window)
        states.window[index] = last_window(channels, runs, m.conv_kernel, window).transpose(1, 2)
        values, b, c = torch.split(convolved, [inner, groups * m.state_size, groups * m.state_size], -1)
        y, final = scan(
            values.view(-1, heads, m.head_dim),
            time_steps(raw, layer.dt_bias, m.time_step_limit),
            layer.A,
            b.view(-1, groups, m.state_size),
            c.view(-1, groups, m.state_size),
            layer.D,
            runs,
            m.chunk_size,
            states.ssm[index].transpose(2, 3).reshape(-1, heads, m.head_dim, m.state_size),
            final=True,
        )
        assert final is not None
        states.ssm[index] = final.view(rows, groups, -1, m.state_size).transpose(2, 3)
        return gated_output(x, y.flatten(1).float(), gate, layer, self.weights)

    def _attention_prefill(
        self,
        x: torch.Tensor,
        layer: AttentionWeights,
        cells: _Cells,
        bias: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """x [n, H] with the layer added; keys and values [B, key-value heads, W, D] are those of this layer."""
        a, queries = self.architecture, self.queries_per_lane
        qkv = linear_forward(layer_norm(x, layer.norm, self.weights), layer.qkv)
        qkv = qkv.view(x.shape[0], a.num_key_value_heads, queries + 2, a.head_dim)
        keys[cells.row, :, cells.column] = qkv[:, :, queries]
        values[cells.row, :, cells.column] = qkv[:, :, queries + 1]
        rows, _, length, _ = bias.shape
        q = x.new_zeros(rows, length, a.num_attention_heads, a.head_dim)
        q[cells.row, cells.place] = qkv[:, :, :queries].flatten(1, 2)
        attended = F.scaled_dot_product_attention(
            q.transpose(1, 2), keys, values, attn_mask=bias, enable_gqa=queries > 1
        )
        flat = attended.transpose(1, 2)[cells.row, cells.place].flatten(1)
        return linear_forward(flat, layer.output, plus=x)
