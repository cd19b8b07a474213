"""Low-rank adapters beside the frozen linears of a transformers model (the dtensor policy's; lora.py has the other's).

Parameters are `….q_proj.lora_A.weight` and `….q_proj.lora_B.weight`, in the linear's own module, so that FSDP2 gathers
them with their layer and PEFT's names are theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

from nemotron_steps.config.schema.peft import LoraConfig
from nemotron_steps.engine.policy.lora import drawn
from nemotron_steps.models.adapters import lora_modules


class HfAdapters:
    """The adapters of one model; freezes the rest of it.

    Args:
        hf: before it is sharded.
        seed: of every A.

    Attributes:
        names: Hugging Face names of the weights that have one.

    Raises:
        ConfigError: a name matches no linear layer, or one that cannot have an adapter.
    """

    def __init__(self, hf: Any, config: LoraConfig, *, seed: int) -> None:
        self.scale, self._config, self._active = config.alpha / config.dim, config, True
        linears = {
            f"model.{name}": module for name, module in hf.model.named_modules() if isinstance(module, torch.nn.Linear)
        }
        chosen = lora_modules(linears, config)
        hf.requires_grad_(False)
        self.names = {f"{name}.weight" for name in chosen}
        for name in chosen:
            self._attach(name, linears[name], seed)

    def _attach(self, name: str, linear: torch.nn.Linear, seed: int) -> None:
        dim = self._config.dim
        settings: dict[str, Any] = {"bias": False, "device": linear.weight.device, "dtype": linear.weight.dtype}
        linear.lora_A = torch.nn.Linear(linear.in_features, dim, **settings)
        linear.lora_B = torch.nn.Linear(dim, linear.out_features, **settings)
        with torch.no_grad():
            linear.lora_A.weight.copy_(drawn((dim, linear.in_features), self._config.lora_A_init, f"{seed}.{name}"))
            linear.lora_B.weight.zero_()
        linear.register_forward_hook(self._added)

    def _added(self, linear: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        if not self._active:
            return output
        first = self._config.dropout_position == "pre"
        states = self._dropped(inputs[0]) if first else inputs[0]
        added = linear.lora_B(linear.lora_A(states))
        return torch.add(output, added if first else self._dropped(added), alpha=self.scale)

    def _dropped(self, states: torch.Tensor) -> torch.Tensor:
        dropout = self._config.dropout
        return F.dropout(states, dropout) if dropout and torch.is_grad_enabled() else states

    @contextmanager
    def off(self) -> Iterator[None]:
        """The model that they were added to."""
        self._active = False
        try:
            yield
        finally:
            self._active = True
