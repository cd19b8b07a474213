"""A mixture of experts in the place of a layer's MLP (Qwen3-MoE, Nemotron 3).

routed = up_latent(Σ_k weight_k · expert_k(down_latent(x)))        the latent projections where the model has them
result = routed + shared(x)                                        a shared expert where it has one
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from nemotron_steps.engine.kernels.fused import activation
from nemotron_steps.engine.kernels.linear import linear
from nemotron_steps.engine.policy.distributed.parallel_dims import ParallelDims, device
from nemotron_steps.engine.policy.layers import Mlp
from nemotron_steps.engine.policy.moe.router import Router
from nemotron_steps.engine.policy.token_layout import TokenLayout
from nemotron_steps.models.architecture import Architecture
from nemotron_steps.models.megatron_core import load_megatron_core

load_megatron_core()

from megatron.core import parallel_state  # noqa: E402


class MoeLayer(torch.nn.Module):
    """Router, experts and what is around them; `number` is of the model's mixtures."""

    def __init__(self, config: Any, architecture: Architecture, layout: ParallelDims, freeze_router: bool) -> None:
        super().__init__()
        hidden, latent, dtype = architecture.hidden_size, architecture.moe_latent_size, config.params_dtype
        self.router = Router(architecture, dtype, frozen=freeze_router)
        self.experts = Experts(architecture, architecture.num_experts // layout.expert, dtype)
        self.fc1_latent_proj = _Weight(latent, hidden, dtype=dtype) if latent else None
        self.fc2_latent_proj = _Weight(hidden, latent, dtype=dtype) if latent else None
        shared = architecture.shared_ffn_hidden_size
        self.shared_experts = Mlp(config, architecture.activation, shared) if shared else None
        self.ranks, self.sequence_parallel = layout.expert, config.sequence_parallel
        self.number: int | None = None

    def forward(self, hidden: Tensor, layout: TokenLayout, *_: Any) -> Tensor:
        """[T, 1, hidden] of this rank's tokens → the same shape."""
        own, place = hidden.shape[0], parallel_state.get_context_parallel_rank()
        if self.sequence_parallel:
            place = place * parallel_state.get_tensor_model_parallel_world_size()
            place += parallel_state.get_tensor_model_parallel_rank()
        mine = slice(place * own, (place + 1) * own)
        replays = layout.routed_experts is not None and self.number is not None
        replayed = layout.routed_experts[mine, self.number] if replays else None  # type: ignore[index]
        return self.mix(hidden, layout.occurrences[mine], replayed)

    def mix(self, hidden: Tensor, occurrences: Tensor, replayed: Tensor | None = None) -> Tensor:
        """[T, 1, hidden] → the same shape."""
        states = hidden.flatten(0, 1)
        weights, chosen = self.router(states, occurrences, replayed)
        if self.fc1_latent_proj is not None:
            states = linear(states, self.fc1_latent_proj.weight)
        mixed = self._routed(states, weights, chosen)
        if self.fc2_latent_proj is not None:
            mixed = linear(mixed, self.fc2_latent_proj.weight)
        mixed = mixed.view_as(hidden)
        return mixed if self.shared_experts is None else self.shared_experts(hidden) + mixed

    def _routed(self, states: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        back = inverse(order)
        sorted_states = to_choices(states, order, back)
        counts = flat.new_zeros(self.router.load.numel()).scatter_add_(0, flat, torch.ones_like(flat))
        if self.ranks == 1:
            out = self.experts(sorted_states, counts)
        else:
            out = on_all_ranks(self.experts, sorted_states, counts, self.ranks)
        per_choice = permute(out, back, order).view(*chosen.shape, -1)
        return (per_choice * weights[..., None].to(per_choice.dtype)).sum(1)


class Experts(torch.nn.Module):
    """This rank's experts as one tensor each product."""

    def __init__(self, architecture: Architecture, count: int, dtype: torch.dtype) -> None:
        super().__init__()
        outer = architecture.moe_latent_size or architecture.hidden_size
        inner = architecture.moe_ffn_hidden_size
        self.activate, rows = activation(architecture.activation)
        self.linear_fc1 = _Weight(count, rows * inner, outer, dtype=dtype)
        self.linear_fc2 = _Weight(count, outer, inner, dtype=dtype)

    def forward(self, states: Tensor, counts: Tensor) -> Tensor:
        """Tokens sorted by expert [n, width], and how many each has → [n, width]."""
        inner = self.activate(_grouped_linear(states, self.linear_fc1.weight, counts))
        return _grouped_linear(inner, self.linear_fc2.weight, counts)


class _Weight(torch.nn.Module):
    def __init__(self, *shape: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=device()))


def _grouped_linear(states: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Each run of `counts[e]` rows times weight[e] transposed; weight [experts, out, in]."""
    if states.is_cuda and states.dtype is torch.bfloat16 and states.shape[0]:
        return F.grouped_mm(states, weight.transpose(1, 2), offs=counts.cumsum(0).to(torch.int32))
    parts = torch.split(states, counts.tolist())
    return torch.cat([F.linear(part, own) for part, own in zip(parts, weight.unbind(), strict=True)])


def on_all_ranks(experts: Experts, states: Tensor, counts: Tensor, ranks: int) -> Tensor:
    """Tokens [n, width], sorted by expert, to their experts' ranks and back. Collective."""
    group = parallel_state.get_expert_model_parallel_group()
    incoming = torch.empty_like(counts)
    dist.all_to_all_single(incoming, counts, group=group)
    local = incoming.view(ranks, -1)
    # The host waits for the GPU here, and nowhere else.
    sent, got = torch.stack((counts.view(ranks, -1).sum(1), local.sum(1))).tolist()
    arrived = _AllToAll.apply(states, sent, got, group)
    # Sorted by source rank, then expert; experts want it the other way round.
    owners = torch.arange(local.shape[1], device=local.device).repeat(ranks)
    order = owners.repeat_interleave(local.flatten(), output_size=sum(got)).argsort(stable=True)
    back = inverse(order)
    out = experts(permute(arrived, order, back), local.sum(0))
    return _AllToAll.apply(permute(out, back, order), got, sent, group)


def inverse(order: Tensor) -> Tensor:
    """The permutation that undoes another, int64 [n]."""
    back = torch.empty_like(order)
    back[order] = torch.arange(order.numel(), device=order.device)
    return back


def to_choices(states: Tensor, order: Tensor, back: Tensor) -> Tensor:
    """Every token once for each choice, sorted by expert: [T, width] → [T · k, width]."""
    if states.is_cuda:
        return _ToChoices.apply(states, order, back)
    return states.index_select(0, order // (order.shape[0] // states.shape[0]))


class _ToChoices(torch.autograd.Function):
    """The gradient is a gather too, summed in float32 and in one order."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        ctx.choices = order.shape[0] // states.shape[0]
        return states.index_select(0, order // ctx.choices)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        by_token = grad.index_select(0, back).view(-1, ctx.choices, grad.shape[1])
        return by_token.sum(1), None, None


class _Permute(torch.autograd.Function):
    """states[order], of a permutation int64 [n] and its inverse, which is that of the gradient."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return states.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return grad.index_select(0, back), None, None


permute = _Permute.apply


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, sent: list[int], got: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.got, ctx.group = sent, got, group
        out = states.new_empty(sum(got), states.shape[1])
        dist.all_to_all_single(out, states.contiguous(), got, sent, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        out = grad.new_empty(sum(ctx.sent), grad.shape[1])
        dist.all_to_all_single(out, grad.contiguous(), ctx.sent, ctx.got, group=ctx.group)
        return out, None, None, None
