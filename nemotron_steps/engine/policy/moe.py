"""A mixture of experts in the place of a layer's MLP (Qwen3-MoE, Nemotron 3), and its router, always in float32.

    routed = up_latent(Σ_k weight_k · expert_k(down_latent(x)))        the latent projections where the model has them
    result = routed + shared(x)                                        a shared expert where it has one

Softmax over all experts (Qwen3-MoE) or sigmoid scores (Nemotron 3). A bias that only chooses balances experts without
an auxiliary loss (arXiv 2408.15664). Experts that the generator chose can be replayed (arXiv 2510.11370).
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from nemotron_steps.engine.kernels.fused import activation, linear
from nemotron_steps.engine.policy.distributed.parallel_dims import Groups, ParallelDims, device
from nemotron_steps.engine.policy.layers import Mlp
from nemotron_steps.engine.policy.token_layout import TokenLayout
from nemotron_steps.models.architecture import Architecture
from nemotron_steps.models.megatron_core import load_megatron_core

load_megatron_core()

from megatron.core import parallel_state  # noqa: E402

_TINY = 1e-20
"""Added to the sum of sigmoid scores, which may all be 0."""


class Router(torch.nn.Module):
    """Scores of all experts, then the top k."""

    def __init__(self, architecture: Architecture, dtype: torch.dtype, *, frozen: bool) -> None:
        super().__init__()
        self.top_k, self.renormalize = architecture.experts_per_token, architecture.norm_topk_prob
        self.sigmoid, self.scale = architecture.router_score == "sigmoid", architecture.routed_scaling_factor
        self.groups, self.top_groups = architecture.router_groups, architecture.router_top_groups
        shape = (architecture.num_experts, architecture.hidden_size)
        # A frozen router takes no part in mixed precision: it keeps the checkpoint's digits.
        weight = torch.empty(shape, dtype=torch.float32 if frozen else dtype, device=device())
        self.weight = torch.nn.Parameter(weight, requires_grad=not frozen)
        self.expert_bias: torch.nn.Parameter | None = None
        if architecture.router_bias:
            zeros = torch.zeros(architecture.num_experts, dtype=torch.float32, device=device())
            self.expert_bias = torch.nn.Parameter(zeros, requires_grad=False)
        self.load = torch.zeros(architecture.num_experts, dtype=torch.float32, device=device())
        """Of each expert on this rank since the last `rebalance`, where passes are counted."""
        self.counts = False
        self.replays = torch.zeros(3, dtype=torch.float64, device=device())
        """Tokens counted: all, those replayed, those this router would have sent elsewhere."""

    def forward(self, states: Tensor, occurrences: Tensor, replayed: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """[T, hidden] → weights float32 and experts int64 [T, k]; replayed where not -1."""
        logits = F.linear(states.float(), self.weight.float())
        scores = logits.sigmoid() if self.sigmoid else logits.softmax(-1)
        with torch.no_grad():
            chosen = self._choose(scores if self.expert_bias is None else scores + self.expert_bias)
            if replayed is not None:
                known, replayed = (replayed >= 0).all(-1), replayed.long()
                if self.counts:
                    other = known & (chosen.sort(-1).values != replayed.sort(-1).values).any(-1)
                    counted = torch.stack((torch.ones_like(known), known, other)).double()
                    self.replays += counted @ occurrences.double()
                chosen = torch.where(known[:, None], replayed, chosen)
        weights = scores.gather(1, chosen)
        if self.renormalize:
            total = weights.sum(-1, keepdim=True)
            weights = weights / (total + _TINY if self.sigmoid else total)
        if self.scale != 1.0:
            weights = weights * self.scale
        if self.expert_bias is not None and self.counts:
            often = occurrences[:, None].expand_as(chosen).flatten()
            self.load.scatter_add_(0, chosen.flatten(), often)  # bincount would wait for the GPU
        return weights, chosen

    def _choose(self, scores: Tensor) -> Tensor:
        """The top k experts [T, k], of the best groups only; a group is as good as its two best."""
        if self.top_groups < self.groups:
            by_group = scores.view(scores.shape[0], self.groups, -1)
            best = by_group.topk(2, dim=-1).values.sum(-1).topk(self.top_groups, dim=-1).indices
            allowed = torch.zeros_like(by_group[..., 0], dtype=torch.bool).scatter_(1, best, True)
            scores = by_group.masked_fill(~allowed[..., None], -torch.inf).flatten(1)
        return scores.topk(self.top_k, dim=-1).indices

    def rebalance(self, rate: float, group: dist.ProcessGroup) -> None:
        """Move the bias of overloaded experts down and of idle ones up by `rate`. Collective."""
        assert self.expert_bias is not None
        dist.all_reduce(self.load, group=group)
        self.expert_bias.data += rate * torch.sign(self.load.mean() - self.load)
        self.load.zero_()


@contextmanager
def counting(routers: Iterable[Router], *, on: bool = True) -> Iterator[None]:
    """Passes in here count towards `load` and `replays`: a training step's, each token once."""
    routers = list(routers)
    before = [router.counts for router in routers]
    for router in routers:
        router.counts = on
    try:
        yield
    finally:
        for router, counted in zip(routers, before, strict=True):
            router.counts = counted


def replay_metrics(routers: Iterable[Router], groups: Groups, device: torch.device) -> dict[str, float]:
    """Shares of the tokens since the last call: replayed, and otherwise chosen. Collective."""
    counts = torch.zeros(3, dtype=torch.float64, device=device)
    for router in routers:
        counts += router.replays
        router.replays.zero_()
    for group in (groups.stage_ranks, groups.pipeline):
        if dist.get_world_size(group) > 1:
            dist.all_reduce(counts, group=group)
    trained, replayed, other = counts.tolist()
    metrics = {}
    if trained:
        metrics["router_replay_share"] = replayed / trained
    if replayed:
        metrics["router_replay_mismatch"] = other / replayed
    return metrics


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
