"""Adapters on their way to a generator of another process, whose frozen weights came once.

What adapters are added to is kept where the weights arrive; A, and B times its scale, travel through the transports
that whole weights take. PEFT's names tell halves of adapters from weights. The policy's side is
engine/policy/lora.py; docs/decisions/adapters.md says why generators have merged weights.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from nemotron_steps.engine.weight_sync.plan import WeightPlan
from nemotron_steps.models.adapters import hf_weight, is_half, low_rank_sum

Weights = Iterator[tuple[str, torch.Tensor]]


def is_adapter(plan: WeightPlan) -> bool:
    """Whether halves of adapters travel by a plan."""
    return any(is_half(entry.name) for bucket in plan.buckets for entry in bucket.entries)


class FrozenWeights:
    """Where a generator's weights arrive: what adapters are added to, in host memory."""

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor | None] = {}

    def expect(self, plan: WeightPlan) -> None:
        """Keep the weights that this plan's adapters belong to, of those that come from now on."""
        names = (entry.name for bucket in plan.buckets for entry in bucket.entries if is_half(entry.name))
        self._kept.update((hf_weight(name), None) for name in names if name.endswith(".lora_B.weight"))

    def through(self, weights: Weights) -> Weights:
        """Weights as they come, and sums where halves of adapters come: an A, then the B of each projection that has
        it."""
        linear_in: torch.Tensor | None = None
        for name, tensor in weights:
            if not is_half(name):
                if name in self._kept:
                    self._kept[name] = tensor.to("cpu", copy=True)
                yield name, tensor
            elif name.endswith(".lora_A.weight"):
                linear_in = tensor.clone()  # a view of a buffer that B may no longer be in
            else:
                kept = self._kept[hf_weight(name)]
                assert kept is not None and linear_in is not None, "frozen weights come before adapters"
                yield hf_weight(name), low_rank_sum(kept.to(tensor.device), linear_in, tensor, 1.0)
