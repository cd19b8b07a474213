"""RMSNorm as megatron-core's specs build it and as residual streams use it."""

from __future__ import annotations

from typing import Any

import torch

from nemotron_steps.engine.policy.kernels.fused import add_rms_norm, rms_norm
from nemotron_steps.engine.policy.parallel_dims import device


class RmsNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with the constructor megatron-core's specs call."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, device=device(), dtype=config.params_dtype)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """[…, hidden_size] → the same shape."""
        assert self.eps is not None
        return rms_norm(states, self.weight, self.eps)

    def after_adding(self, states: torch.Tensor, added: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """states + added, and its norm."""
        assert self.eps is not None
        return add_rms_norm(states, added, self.weight, self.eps)
