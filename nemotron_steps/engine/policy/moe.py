"""Mixture of experts over flat tokens (Qwen3-MoE): a float32 router, and experts as one tensor each.

The router can be frozen (RL recipes do), and loads can be balanced without an auxiliary loss (DeepSeek-V3, arXiv
2408.15664): a bias that only chooses experts and moves against their load after every step. megatron-core's
dispatchers need CUDA streams; under expert parallelism tokens travel here by plain all-to-all.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from nemotron_steps.engine.policy.kernels.fused import swiglu
from nemotron_steps.engine.policy.parallel_dims import ParallelDims, device
from nemotron_steps.models.architecture import Architecture


class Router(torch.nn.Module):
    """Softmax over all experts in float32, then the top k."""

    def __init__(self, architecture: Architecture, dtype: torch.dtype, *, frozen: bool) -> None:
        super().__init__()
        self.top_k, self.renormalize = architecture.experts_per_token, architecture.norm_topk_prob
        shape = (architecture.num_experts, architecture.hidden_size)
        # A frozen router takes no part in mixed precision: it keeps the checkpoint's digits.
        weight = torch.empty(shape, dtype=torch.float32 if frozen else dtype, device=device())
        self.weight = torch.nn.Parameter(weight, requires_grad=not frozen)
        self.expert_bias: torch.nn.Parameter | None = None
        if architecture.router_bias:
            zeros = torch.zeros(architecture.num_experts, dtype=torch.float32, device=device())
            self.expert_bias = torch.nn.Parameter(zeros, requires_grad=False)
        self.load = torch.zeros(architecture.num_experts, dtype=torch.float32, device=device())
        """Tokens each expert got on this rank since the last `rebalance`, while training."""

    def forward(self, states: torch.Tensor, occurrences: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, hidden] → weights float32 [T, k] and experts int64 [T, k].

        Args:
            occurrences: float32 [T], how often each token counts for the load.
        """
        probabilities = F.linear(states.float(), self.weight.float()).softmax(-1)
        scores = probabilities if self.expert_bias is None else probabilities + self.expert_bias
        chosen = scores.topk(self.top_k, dim=-1).indices
        weights = probabilities.gather(1, chosen)
        if self.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        if self.expert_bias is not None and torch.is_grad_enabled():
            often = occurrences[:, None].expand_as(chosen).flatten()
            self.load += torch.bincount(chosen.flatten(), often, minlength=self.load.numel())
        return weights, chosen

    def rebalance(self, rate: float, group: dist.ProcessGroup) -> None:
        """Move the bias of overloaded experts down and of idle ones up by `rate`; start counting anew. Collective."""
        assert self.expert_bias is not None
        dist.all_reduce(self.load, group=group)
        self.expert_bias.data += rate * torch.sign(self.load.mean() - self.load)
        self.load.zero_()


class _Stacked(torch.nn.Module):
    def __init__(self, *shape: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=device()))


class Experts(torch.nn.Module):
    """This rank's experts."""

    def __init__(self, architecture: Architecture, count: int, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, inner = architecture.hidden_size, architecture.moe_ffn_hidden_size
        self.linear_fc1 = _Stacked(count, 2 * inner, hidden, dtype=dtype)
        self.linear_fc2 = _Stacked(count, hidden, inner, dtype=dtype)

    def forward(self, states: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Tokens sorted by expert [n, hidden], and how many each expert has [experts] → [n, hidden]."""
        inner = swiglu(_grouped_linear(states, self.linear_fc1.weight, counts))
        return _grouped_linear(inner, self.linear_fc2.weight, counts)


class FlatMoe(torch.nn.Module):
    """Router and experts in the place of a layer's MLP.

    Args:
        config: megatron-core's (its specs pass it).
        architecture: the model.
        layout: parallel sizes.
        freeze_router: keep the router as it is, in float32.
    """

    def __init__(
        self, config: Any, architecture: Architecture, layout: ParallelDims, freeze_router: bool, **_: Any
    ) -> None:
        super().__init__()
        self.router = Router(architecture, config.params_dtype, frozen=freeze_router)
        self.experts = Experts(architecture, architecture.num_experts // layout.expert, config.params_dtype)
        self.ranks = layout.expert

    def forward(self, hidden: torch.Tensor, occurrences: torch.Tensor) -> torch.Tensor:
        """[T, 1, hidden] → the same shape. `occurrences` as the router takes it."""
        states = hidden.flatten(0, 1)
        weights, chosen = self.router(states, occurrences)
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        sorted_states = states.index_select(0, order // chosen.shape[1])
        counts = torch.bincount(flat, minlength=self.router.load.numel())
        if self.ranks == 1:
            out = self.experts(sorted_states, counts)
        else:
            out = self._on_all_ranks(sorted_states, counts)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.numel(), device=order.device)
        per_choice = out.index_select(0, back).view(*chosen.shape, -1)
        mixed: torch.Tensor = (per_choice * weights[..., None].to(per_choice.dtype)).sum(1)
        return mixed.view_as(hidden)

    def _on_all_ranks(self, states: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Send tokens (sorted by expert) to their experts' ranks, compute there, bring the results back."""
        from megatron.core import parallel_state

        group = parallel_state.get_expert_model_parallel_group()
        incoming = torch.empty_like(counts)
        dist.all_to_all_single(incoming, counts, group=group)
        local = incoming.view(self.ranks, -1)
        sent, got = counts.view(self.ranks, -1).sum(1).tolist(), local.sum(1).tolist()
        arrived: torch.Tensor = _AllToAll.apply(states, sent, got, group)  # type: ignore[no-untyped-call]
        # Sorted by source rank, then expert; experts want it the other way round.
        experts = torch.arange(local.shape[1], device=local.device).repeat(self.ranks)
        order = experts.repeat_interleave(local.flatten()).argsort(stable=True)
        out = self.experts(arrived.index_select(0, order), local.sum(0))
        back = torch.empty_like(order)
        back[order] = torch.arange(order.numel(), device=order.device)
        returned: torch.Tensor = _AllToAll.apply(  # type: ignore[no-untyped-call]
            out.index_select(0, back), got, sent, group
        )
        return returned


def _grouped_linear(states: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Each run of `counts[e]` rows times weight[e] transposed; weight [experts, out, in]."""
    if states.is_cuda and states.dtype is torch.bfloat16 and states.shape[0]:
        return F.grouped_mm(states, weight.transpose(1, 2), offs=counts.cumsum(0).to(torch.int32))
    parts = torch.split(states, counts.tolist())
    return torch.cat([F.linear(part, own) for part, own in zip(parts, weight.unbind(), strict=True)])


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, states: torch.Tensor, sent: list[int], got: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.sent, ctx.got, ctx.group = sent, got, group
        return _all_to_all(states, sent, got, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # type: ignore[override]
        return _all_to_all(grad, ctx.got, ctx.sent, ctx.group), None, None, None


def _all_to_all(states: torch.Tensor, sent: list[int], got: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    out = states.new_empty(sum(got), states.shape[1])
    dist.all_to_all_single(out, states.contiguous(), got, sent, group=group)
    return out
