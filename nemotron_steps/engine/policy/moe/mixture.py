"""A mixture of experts in the place of a layer's MLP (Qwen3-MoE, Nemotron 3).

    routed = up_latent(Σ_k weight_k · expert_k(down_latent(x)))        the latent projections where the model has them
    result = routed + shared(x)                                        a shared expert where it has one

The router and the shared expert see the full width.
"""

from __future__ import annotations

from typing import Any

import torch

from nemotron_steps.engine.policy.kernels.dense import linear
from nemotron_steps.engine.policy.mlp import FlatMlp
from nemotron_steps.engine.policy.moe.experts import Experts, inverse, on_all_ranks, permute, to_choices
from nemotron_steps.engine.policy.moe.router import Router
from nemotron_steps.engine.policy.parallel_dims import ParallelDims, device
from nemotron_steps.models.architecture import Architecture


class FlatMoe(torch.nn.Module):
    """Router, experts and what is around them.

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
        hidden, latent, dtype = architecture.hidden_size, architecture.moe_latent_size, config.params_dtype
        self.router = Router(architecture, dtype, frozen=freeze_router)
        self.experts = Experts(architecture, architecture.num_experts // layout.expert, dtype)
        self.fc1_latent_proj = _Projection(latent, hidden, dtype) if latent else None
        self.fc2_latent_proj = _Projection(hidden, latent, dtype) if latent else None
        shared = architecture.shared_ffn_hidden_size
        self.shared_experts = FlatMlp(config, architecture.activation, shared) if shared else None
        self.ranks = layout.expert
        self.number: int | None = None
        """Of the whole model's mixtures, from 0; the model counts them. None in multi-token prediction."""

    def forward(
        self, hidden: torch.Tensor, occurrences: torch.Tensor, replayed: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[T, 1, hidden] → the same shape. `occurrences` and `replayed` as the router takes them."""
        states = hidden.flatten(0, 1)
        weights, chosen = self.router(states, occurrences, replayed)
        routed = states if self.fc1_latent_proj is None else self.fc1_latent_proj(states)
        mixed = self._routed(routed, weights, chosen)
        if self.fc2_latent_proj is not None:
            mixed = self.fc2_latent_proj(mixed)
        if self.shared_experts is None:
            return mixed.view_as(hidden)
        shared: torch.Tensor = self.shared_experts(hidden)
        return shared + mixed.view_as(hidden)

    def _routed(self, states: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """The weighted sum of what each token's experts make of it, [T, width] → the same shape."""
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
        mixed: torch.Tensor = (per_choice * weights[..., None].to(per_choice.dtype)).sum(1)
        return mixed


class _Projection(torch.nn.Module):
    """A linear layer that every tensor-parallel rank has whole."""

    def __init__(self, rows: int, columns: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(rows, columns, dtype=dtype, device=device()))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """[T, columns] → [T, rows]."""
        return linear(states, self.weight)
