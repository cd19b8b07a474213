"""A hybrid model (Nemotron-H): layers of one norm, one mixer and the residual; keys and values for attention, states
for Mamba-2.

Prompts are fed as flat tokens, without padding, which must not touch a state; attention alone pads, to read the cache.
For one new token experts are two matrix products over all of them: those that it has not chosen weigh nothing.

Shapes: n flat tokens, B rows, T tokens and W cache columns in view, H hidden, D head size, R query heads per key-value
head; G groups, N state size, I inner size, C channels and k taps of the convolution; E experts of inner size F.
"""

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
from nemotron_steps.engine.generation.embedded.dense_model import ModelWeights, attend, norm
from nemotron_steps.engine.kernels.fused import linear_forward
from nemotron_steps.engine.policy.mamba.scan import Runs, conv, last_window, scan, time_steps
from nemotron_steps.models.architecture import Architecture, Mamba2

_ALL_EXPERTS = 4
"""Every expert is computed for every token of a prompt where there are at most this many times those it chooses."""


class MambaWeights(NamedTuple):
    """One Mamba-2 layer: in_proj [I + C + heads, H] of gate, convolved channels and time steps; conv [k, C], the weight
    of the newest input last; dt_bias, A_log, A = -exp(A_log) and D float32 [heads]; gated_norm [G, I / G]."""

    norm: torch.Tensor
    in_proj: torch.Tensor
    conv: torch.Tensor
    conv_bias: torch.Tensor
    dt_bias: torch.Tensor
    A_log: torch.Tensor
    A: torch.Tensor
    D: torch.Tensor
    gated_norm: torch.Tensor
    out_proj: torch.Tensor


class AttentionWeights(NamedTuple):
    """One attention layer; qkv [key-value heads * (R + 2) * D, H]."""

    norm: torch.Tensor
    qkv: torch.Tensor
    output: torch.Tensor


class MlpWeights(NamedTuple):
    """One MLP layer."""

    norm: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor


class ExpertWeights(NamedTuple):
    """One layer of experts: router float32 [E, H] and its bias [E], up [E * F, H or latent size], down the other
    way."""

    norm: torch.Tensor
    router: torch.Tensor
    router_bias: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    shared_up: torch.Tensor | None
    shared_down: torch.Tensor | None
    into_latent: torch.Tensor | None
    from_latent: torch.Tensor | None


Weights = MambaWeights | AttentionWeights | MlpWeights | ExpertWeights


def layer_norm(x: torch.Tensor, weight: torch.Tensor, model: ModelWeights) -> torch.Tensor:
    """RMSNorm over the last dimension, multiplied by its weight before it is rounded to 16 bits."""
    if x.is_cuda or x.dtype != torch.float32:
        return F.rms_norm(x, [x.size(-1)], weight, model.eps)
    return norm(x, weight, model)


def mamba_step(
    x: torch.Tensor, layer: MambaWeights, a: Mamba2, model: ModelWeights, states: LayerStates, newest: int
) -> torch.Tensor:
    """x [B, H] with the layer added, on CPU or without a CUDA graph; `newest` as RowStates.newest."""
    projected = linear_forward(layer_norm(x, layer.norm, model), layer.in_proj)
    inputs = states.inputs.unbind(0)
    inputs[newest].copy_(projected.narrow(1, a.inner_size, a.conv_channels))
    taps = len(inputs)
    convolved = layer.conv_bias
    for tap, weight in enumerate(layer.conv.unbind(0)):
        place = inputs[(newest + 1 + tap) % taps]
        convolved = torch.addcmul(convolved, place, weight) if tap == 0 else convolved.addcmul_(place, weight)
    return _mamba_rest(x, layer, a, model, states.ssm, projected, F.silu(convolved, inplace=True))


def mamba_step_on_device(
    x: torch.Tensor, layer: MambaWeights, a: Mamba2, model: ModelWeights, states: LayerStates, place: torch.Tensor
) -> torch.Tensor:
    """The same with kernels that do not depend on where in the ring the host is; `place` as RowStates.place."""
    projected = linear_forward(layer_norm(x, layer.norm, model), layer.in_proj)
    taps = states.inputs.size(0)
    states.inputs.index_copy_(0, place, projected.narrow(1, a.inner_size, a.conv_channels).unsqueeze(0))
    age = (torch.arange(taps - 1, 2 * taps - 1, device=place.device) - place) % taps
    convolved = (states.inputs * layer.conv.index_select(0, age).unsqueeze(1)).sum(0).add_(layer.conv_bias)
    return _mamba_rest(x, layer, a, model, states.ssm, projected, F.silu(convolved, inplace=True))


def _mamba_rest(
    x: torch.Tensor,
    layer: MambaWeights,
    a: Mamba2,
    model: ModelWeights,
    ssm: torch.Tensor,
    projected: torch.Tensor,
    convolved: torch.Tensor,
) -> torch.Tensor:
    """The layer from its convolved channels [B, C] on: h ← exp(dt·A)·h + B ⊗ dt·x, y = C·h + D·x."""
    rows, heads, groups, inner, size = x.size(0), a.num_heads, a.num_groups, a.inner_size, a.state_size
    convolved = convolved.float()
    dt = time_steps(projected.narrow(1, inner + a.conv_channels, heads), layer.dt_bias, a.time_step_limit)
    decay = torch.exp(dt * layer.A).view(rows, groups, 1, heads // groups, 1)
    inputs = convolved.narrow(1, 0, inner)
    write = convolved.narrow(1, inner, groups * size).view(rows, groups, size, 1)
    read = convolved.narrow(1, inner + groups * size, groups * size)
    ssm.view(rows, groups, size, heads // groups, -1).mul_(decay)
    scaled = inputs.view(rows, heads, -1) * dt.unsqueeze(-1)
    ssm.addcmul_(write, scaled.view(rows, groups, 1, -1))
    y = torch.bmm(read.reshape(rows * groups, 1, size), ssm.view(rows * groups, size, -1)).view(rows, heads, -1)
    y = y.addcmul_(inputs.view(rows, heads, -1), layer.D.unsqueeze(-1)).view(rows, inner)
    return gated_output(x, y, projected.narrow(1, 0, inner), layer, model)


def gated_output(
    x: torch.Tensor, y: torch.Tensor, gate: torch.Tensor, layer: MambaWeights, model: ModelWeights
) -> torch.Tensor:
    """x with the output projection of y added, y float32 [B, I] being gated and normed group by group; y is lost."""
    gated = y.mul_(F.silu(gate.float())).view(y.size(0), *layer.gated_norm.shape)
    normed = norm(gated, layer.gated_norm, model).view(y.shape)
    return linear_forward(normed.to(x.dtype), layer.out_proj, plus=x)


def mlp(x: torch.Tensor, layer: MlpWeights, model: ModelWeights) -> torch.Tensor:
    """x [B, H] with the layer added."""
    inner = linear_forward(layer_norm(x, layer.norm, model), layer.up)
    return linear_forward(inner.relu_().square_(), layer.down, plus=x)


def route(normed: torch.Tensor, layer: ExpertWeights, a: Architecture) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 weights and int64 experts [B, experts per token] of tokens [B, H]."""
    scores = linear_forward(normed.float(), layer.router).sigmoid_()
    choice = scores + layer.router_bias
    if a.router_groups > 1:
        grouped = choice.view(-1, a.router_groups, a.num_experts // a.router_groups)
        of_group = grouped.topk(min(2, grouped.size(-1)), -1).values.sum(-1)
        best = of_group.topk(a.router_top_groups, -1).indices
        allowed = torch.zeros_like(of_group, dtype=torch.bool).scatter_(1, best, True)
        choice = grouped.masked_fill(~allowed.unsqueeze(-1), float("-inf")).view(choice.shape)
    chosen = choice.topk(a.experts_per_token, -1, sorted=False).indices
    weights = scores.gather(1, chosen)
    if a.norm_topk_prob:
        weights.div_(weights.sum(-1, keepdim=True).add_(1e-20))
    if a.routed_scaling_factor != 1:
        weights.mul_(a.routed_scaling_factor)
    return weights, chosen


def experts(
    x: torch.Tensor,
    layer: ExpertWeights,
    a: Architecture,
    model: ModelWeights,
    *,
    every: bool = True,
    record: list[torch.Tensor] | None = None,
) -> torch.Tensor:
    """x [B, H] with the layer added; `record` takes the chosen experts, int64 [B, k]. With `every`, every expert is
    computed for every token: two products, and no number that the host must know."""
    normed = layer_norm(x, layer.norm, model)
    weights, chosen = route(normed, layer, a)
    if record is not None:
        record.append(chosen)
    if layer.shared_up is not None and layer.shared_down is not None:
        x = linear_forward(linear_forward(normed, layer.shared_up).relu_().square_(), layer.shared_down, plus=x)
    into = normed if layer.into_latent is None else linear_forward(normed, layer.into_latent)
    if not every and a.num_experts > _ALL_EXPERTS * a.experts_per_token:
        routed = _chosen_experts(into, layer, weights, chosen)
        return x + routed if layer.from_latent is None else linear_forward(routed, layer.from_latent, plus=x)
    inner = linear_forward(into, layer.up).relu_().square_()
    of_expert = torch.zeros((x.size(0), a.num_experts), dtype=x.dtype, device=x.device)
    of_expert.scatter_(1, chosen, weights.to(x.dtype))
    inner.view(x.size(0), a.num_experts, -1).mul_(of_expert.unsqueeze(-1))
    if layer.from_latent is None:
        return linear_forward(inner, layer.down, plus=x)
    return linear_forward(linear_forward(inner, layer.down), layer.from_latent, plus=x)


def _chosen_experts(
    into: torch.Tensor, layer: ExpertWeights, weights: torch.Tensor, chosen: torch.Tensor
) -> torch.Tensor:
    """The sum of the experts' outputs [B, H or latent size], each expert over those tokens that chose it."""
    per_token, count = chosen.size(1), layer.router.size(0)
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    token = order // per_token
    sorted_weights = weights.flatten().index_select(0, order).unsqueeze(-1).to(into.dtype)
    out = torch.zeros_like(into)
    ups, downs = layer.up.view(count, -1, into.size(1)), layer.down.view(into.size(1), count, -1)
    begin = 0
    for expert, tokens in enumerate(torch.bincount(flat, minlength=count).tolist()):
        if tokens:
            mine = token[begin : begin + tokens]
            inner = linear_forward(into.index_select(0, mine), ups[expert]).relu_().square_()
            inner.mul_(sorted_weights[begin : begin + tokens])
            out.index_add_(0, mine, linear_forward(inner, downs[:, expert]))
            begin += tokens
    return out


class _Cells(NamedTuple):
    """Where flat tokens lie in a padded batch [B, T], int64 [n] each: row, place in it and column of the cache; and
    each row's last flat token [B]."""

    row: torch.Tensor
    place: torch.Tensor
    column: torch.Tensor
    last: torch.Tensor


class CachedHybridModel(CachedModel):
    """Weights and forward pass of a Nemotron-H model."""

    UNUSED = ("mtp.",)

    def __init__(self, architecture: Architecture, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(architecture, cached_layers=architecture.pattern.count("*"), device=device, dtype=dtype)
        a = architecture
        self._scale = a.head_dim**-0.5
        make: dict[str, Callable[[str, torch.Tensor], Weights]]
        make = {"M": self._mamba, "*": self._attention, "-": self._mlp, "E": self._experts}
        hidden = a.hidden_size
        self.weights = ModelWeights(
            embedding=self._named("backbone.embeddings.weight", a.vocab_size, hidden),
            head=self._named("lm_head.weight", a.vocab_size, hidden),
            final_norm=self._named("backbone.norm_f.weight", hidden),
            rotations=torch.ones((1, a.head_dim // 2), device=device, dtype=torch.complex64),
            epsilon=torch.tensor(a.norm_eps, device=device, dtype=torch.float32),
            eps=a.norm_eps,
        )
        self.layers: list[Weights] = [
            make[kind](f"backbone.layers.{i}.", self._named(f"backbone.layers.{i}.norm.weight", hidden))
            for i, kind in enumerate(a.pattern)
        ]

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
        a, prefix = self.architecture, f"{prefix}mixer."
        output = self._named(f"{prefix}o_proj.weight", a.hidden_size, a.num_attention_heads * a.head_dim)
        return AttentionWeights(norm, self._qkv(prefix, "weight", a.hidden_size), output)

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
        hidden, inner = a.hidden_size, a.moe_ffn_hidden_size
        shared, latent = a.shared_ffn_hidden_size, a.moe_latent_size
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

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> int:
        """CachedModel.load; experts one by one, as on the hub."""
        received = super().load(weights)
        for layer in self.layers:
            if isinstance(layer, MambaWeights):
                layer.A.copy_(-layer.A_log.exp())
        return received

    def _state(self, m: Mamba2, rows: int, inputs: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        layers = self.architecture.pattern.count("M")
        shape = (layers, rows, m.num_groups, m.state_size, m.inner_size // m.num_groups)
        ssm = torch.zeros(shape, device=self.device, dtype=torch.float32)
        return ssm, torch.zeros((layers, *inputs, m.conv_channels), device=self.device, dtype=self.dtype)

    def new_states(self, rows: int) -> States | None:
        """CachedModel.new_states"""
        m = self.architecture.mamba
        return None if m is None else States(*self._state(m, rows, (rows, m.conv_kernel - 1)))

    def new_row_states(self, rows: int) -> RowStates | None:
        """CachedModel.new_row_states"""
        m = self.architecture.mamba
        return None if m is None else RowStates(*self._state(m, rows, (m.conv_kernel, rows)))

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
        counts, width = np.array(lengths), tokens.shape[1]
        row, place = (np.arange(width) >= width - counts[:, None]).nonzero()
        indices = (row, place, place + keys.shape[3] - width, counts.cumsum() - 1)
        cells = _Cells(*(torch.from_numpy(index).to(self.device) for index in indices))
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
        self, x: torch.Tensor, layer: AttentionWeights, cells: _Cells, bias: torch.Tensor, *cache: torch.Tensor
    ) -> torch.Tensor:
        """x [n, H] with the layer added; `cache`: keys and values [B, key-value heads, W, D] of this layer."""
        a, queries, (keys, values) = self.architecture, self.queries_per_lane, cache
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
