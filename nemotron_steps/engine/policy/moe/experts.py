"""Experts as one tensor for all of a rank's, and the way of tokens to the ranks that have their experts.

megatron-core's dispatchers need CUDA streams; under expert parallelism tokens travel here by plain all-to-all.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from nemotron_steps.engine.policy.kernels.fused import activation
from nemotron_steps.engine.policy.parallel_dims import device
from nemotron_steps.models.architecture import Architecture


class Experts(torch.nn.Module):
    """This rank's experts: SwiGLU MLPs, or relu² ones without a gate."""

    def __init__(self, architecture: Architecture, count: int, dtype: torch.dtype) -> None:
        super().__init__()
        outer = architecture.moe_latent_size or architecture.hidden_size
        inner = architecture.moe_ffn_hidden_size
        self.activate, rows = activation(architecture.activation)
        self.linear_fc1 = _Stacked(count, rows * inner, outer, dtype=dtype)
        self.linear_fc2 = _Stacked(count, outer, inner, dtype=dtype)

    def forward(self, states: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Tokens sorted by expert [n, width], and how many each expert has [experts] → [n, width]."""
        inner = self.activate(_grouped_linear(states, self.linear_fc1.weight, counts))
        return _grouped_linear(inner, self.linear_fc2.weight, counts)


class _Stacked(torch.nn.Module):
    def __init__(self, *shape: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=device()))


def on_all_ranks(experts: Experts, states: torch.Tensor, counts: torch.Tensor, ranks: int) -> torch.Tensor:
    """Send tokens to their experts' ranks, compute there, bring the results back. Collective over expert ranks.

    Args:
        states: [n, width], sorted by expert.
        counts: int64 [all experts], tokens of each.

    Returns:
        [n, width] in the same order.
    """
    from megatron.core import parallel_state

    group = parallel_state.get_expert_model_parallel_group()
    incoming = torch.empty_like(counts)
    dist.all_to_all_single(incoming, counts, group=group)
    local = incoming.view(ranks, -1)
    # The host waits for the GPU here, and nowhere else.
    sent, got = torch.stack((counts.view(ranks, -1).sum(1), local.sum(1))).tolist()
    arrived: torch.Tensor = _AllToAll.apply(states, sent, got, group)  # type: ignore[no-untyped-call]
    # Sorted by source rank, then expert; experts want it the other way round.
    owners = torch.arange(local.shape[1], device=local.device).repeat(ranks)
    order = owners.repeat_interleave(local.flatten(), output_size=sum(got)).argsort(stable=True)
    back = inverse(order)
    out = experts(permute(arrived, order, back), local.sum(0))
    returned: torch.Tensor = _AllToAll.apply(  # type: ignore[no-untyped-call]
        permute(out, back, order), got, sent, group
    )
    return returned


def inverse(order: torch.Tensor) -> torch.Tensor:
    """The permutation that undoes `order`, int64 [n]."""
    back = torch.empty_like(order)
    back[order] = torch.arange(order.numel(), device=order.device)
    return back


def to_choices(states: torch.Tensor, order: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
    """Every token once for each of its k choices, in the order of experts: [T, width] → [T · k, width].

    Args:
        order: int64 [T · k], choices (token · k + number) sorted by expert.
        back: its inverse.
    """
    choices = order.shape[0] // states.shape[0]
    if states.is_cuda:
        spread: torch.Tensor = _ToChoices.apply(states, order, back)  # type: ignore[no-untyped-call]
        return spread
    return states.index_select(0, order // choices)


def permute(states: torch.Tensor, order: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
    """Rows of `states` in another order: states[order].

    Args:
        order: int64 [n], a permutation.
        back: its inverse.
    """
    permuted: torch.Tensor = _Permute.apply(states, order, back)  # type: ignore[no-untyped-call]
    return permuted


def _grouped_linear(states: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Each run of `counts[e]` rows times weight[e] transposed; weight [experts, out, in]."""
    if states.is_cuda and states.dtype is torch.bfloat16 and states.shape[0]:
        return F.grouped_mm(states, weight.transpose(1, 2), offs=counts.cumsum(0).to(torch.int32))
    parts = torch.split(states, counts.tolist())
    return torch.cat([F.linear(part, own) for part, own in zip(parts, weight.unbind(), strict=True)])


class _ToChoices(torch.autograd.Function):
    """A gather whose gradient is a gather too, summed in float32: autograd's own would add k terms in the states' type
    and, on a GPU, in any order."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, order: torch.Tensor, back: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(back)
        ctx.choices = order.shape[0] // states.shape[0]
        return states.index_select(0, order // ctx.choices)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        (back,) = ctx.saved_tensors
        by_token = grad.index_select(0, back).view(-1, ctx.choices, grad.shape[1])
        return by_token.sum(1), None, None


class _Permute(torch.autograd.Function):
    """Its gradient is the inverse permutation, not a sum into zeros."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, order: torch.Tensor, back: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(back)
        return states.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        (back,) = ctx.saved_tensors
        return grad.index_select(0, back), None, None


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
