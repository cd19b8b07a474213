"""The layers of a hybrid model over flat tokens, and what they do for one new token of every row.

A layer is one norm, one mixer and the residual: Mamba-2, attention, MLP or experts. As in dense_model.py the number of
operators is what counts: experts are two matrix products over all of them, in which those that a token has not chosen
weigh nothing, and the state is laid out so that a step needs three passes over it.

Not for: what a weight is called and how prompts are fed (hybrid_model.py).

Shapes: B rows or tokens, H hidden, D head size, R query heads per key-value head; for Mamba-2 G groups, N state size,
I inner size, C channels and k taps of the convolution; E experts of inner size F.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from nemotron_steps.engine.generation.embedded.cached_model import LayerStates
from nemotron_steps.engine.generation.embedded.dense_model import ModelWeights, norm
from nemotron_steps.engine.kernels.linear import linear_forward
from nemotron_steps.engine.policy.mamba.scan import time_steps
from nemotron_steps.models.architecture import Architecture, Mamba2

_ALL_EXPERTS = 4
"""Every expert is computed for every token of a prompt where there are at most this many times those it chooses."""


class MambaWeights(NamedTuple):
    """One Mamba-2 layer."""

    norm: torch.Tensor
    in_proj: torch.Tensor
    """[I + C + heads, H]: gate, convolved channels, time steps"""
    conv: torch.Tensor
    """[k, C], the weight of the newest input last"""
    conv_bias: torch.Tensor
    dt_bias: torch.Tensor
    """float32 [heads], as the next three"""
    A_log: torch.Tensor
    A: torch.Tensor
    """-exp(A_log)"""
    D: torch.Tensor
    gated_norm: torch.Tensor
    """[G, I / G]"""
    out_proj: torch.Tensor


class AttentionWeights(NamedTuple):
    """One attention layer."""

    norm: torch.Tensor
    qkv: torch.Tensor
    """[key-value heads * (R + 2) * D, H]"""
    output: torch.Tensor


class MlpWeights(NamedTuple):
    """One MLP layer."""

    norm: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor


class ExpertWeights(NamedTuple):
    """One layer of experts."""

    norm: torch.Tensor
    router: torch.Tensor
    """float32 [E, H]"""
    router_bias: torch.Tensor
    """float32 [E]"""
    up: torch.Tensor
    """[E * F, H or latent size]"""
    down: torch.Tensor
    """[H or latent size, E * F]"""
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
    """x [B, H] with the layer added.

    Args:
        record: takes the chosen experts, int64 [B, k].
        every: compute every expert for every token: two products, and no number that the host must know. All weights
            are read anyway once a few tokens have chosen.
    """
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
