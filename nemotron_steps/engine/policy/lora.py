"""Low-rank adapters beside the frozen linears of a policy (LoRA, arXiv 2106.09685).

    y = W x + alpha / dim · B A x        A drawn at random, B zero: the model starts as it was, bit for bit

A column-parallel linear has all of A and its rows of B; a row-parallel one its columns of A and all of B.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from nemotron_steps.config.schema.policy import LoraConfig, PeftConfig
from nemotron_steps.engine.kernels.fused import linear
from nemotron_steps.errors import ConfigError
from nemotron_steps.models.adapters import AdapterPair, lora_modules
from nemotron_steps.models.mapping import megatron_shape, shard

if TYPE_CHECKING:
    from nemotron_steps.engine.policy.model import PolicyModel


class LowRank(torch.nn.Module):
    """One linear's adapter. Its A depends on the seed and on the linear's name alone, not on the layout."""

    def __init__(self, of: Any, pair: AdapterPair, config: PeftConfig, *, sequence_parallel: bool, seed: int) -> None:
        super().__init__()
        self.active = True
        self.scale = config.alpha / config.dim
        self._dropout, self._first = config.dropout, config.dropout_position == "pre"
        self._column, self._sequence_parallel = pair.base.tp_dim == 0, sequence_parallel
        self._ranks = of.tp_group.size()
        whole = drawn(megatron_shape(pair.linear_in), config.lora_A_init_method, f"{seed}.{pair.module}")
        own = shard(pair.linear_in, whole, dist.get_rank(of.tp_group), self._ranks)
        rows = of.weight.shape[0]
        settings: dict[str, Any] = {"bias": False, "device": of.weight.device, "dtype": of.weight.dtype}
        self.linear_in = torch.nn.Linear(own.shape[1], config.dim, **settings)
        self.linear_out = torch.nn.Linear(config.dim, rows, **settings)
        with torch.no_grad():
            self.linear_in.weight.copy_(own)
            self.linear_out.weight.zero_()

    def added_to(self, output: Tensor, states: Tensor) -> Tensor:
        """What the linear makes with its adapter: output [T, 1, out] is what it makes without, of states [T, 1, in]."""
        if not self.active:
            return output
        from megatron.core.tensor_parallel import mappings

        if self._first:
            states = _dropped(states, self._dropout)
        if self._ranks > 1 and self._column and self._sequence_parallel:
            states = mappings.gather_from_sequence_parallel_region(states, tensor_parallel_output_grad=True)
        elif self._ranks > 1 and self._column:
            states = mappings.copy_to_tensor_model_parallel_region(states)
        inner = linear(states, self.linear_in.weight)
        if self._ranks > 1 and not self._column and self._sequence_parallel:
            inner = mappings.reduce_scatter_to_sequence_parallel_region(inner)
        elif self._ranks > 1 and not self._column:
            inner = mappings.reduce_from_tensor_model_parallel_region(inner)
        added = linear(inner, self.linear_out.weight)
        if not self._first:
            added = _dropped(added, self._dropout)
        return torch.add(output, added, alpha=self.scale)


def _dropped(states: Tensor, dropout: float) -> Tensor:
    return F.dropout(states, dropout) if dropout and torch.is_grad_enabled() else states


def drawn(shape: tuple[int, ...], method: str, name: str) -> Tensor:
    """float32 A [r, in] for a name, the same in every layout and process."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    tensor = torch.empty(shape)
    if method == "xavier":
        return torch.nn.init.xavier_normal_(tensor, generator=generator)
    return torch.nn.init.kaiming_uniform_(tensor, a=math.sqrt(5), generator=generator)


def attach_adapters(model: PolicyModel, pairs: Sequence[AdapterPair], config: PeftConfig, *, seed: int) -> None:
    """Freeze a model and give the linears that this rank has of `pairs` their adapters."""
    model.requires_grad_(False)
    own = {layer.layer_number - 1: number for number, layer in enumerate(model.decoder.layers)}
    model.adapters, model.adapter_scale = tuple(pairs), config.alpha / config.dim
    attached = 0
    for pair in pairs:
        assert pair.base.layer is not None
        if pair.base.layer not in own:
            continue
        place = f"decoder.layers.{own[pair.base.layer]}"
        of: Any = model.get_submodule(pair.module.replace(f"decoder.layers.{pair.base.layer}", place, 1))
        of.adapter = LowRank(of, pair, config, sequence_parallel=model.layout.sequence_parallel, seed=seed)
        model.decoder.layers[own[pair.base.layer]].adapted = True
        attached += 1
    if not attached:
        raise ConfigError(
            "a pipeline stage has no linear layer with an adapter, and so nothing to train",
            where="policy.megatron_cfg.peft.target_modules",
            expected="linear layers of every stage",
            found=", ".join(config.target_modules),
            hints=("policy.megatron_cfg.peft.target_modules=[]", "policy.megatron_cfg.pipeline_model_parallel_size=1"),
        )


@contextmanager
def without_adapters(model: PolicyModel) -> Iterator[None]:
    """The model that the adapters were added to: the reference, without a second copy."""
    adapters = [module for module in model.modules() if isinstance(module, LowRank)]
    for adapter in adapters:
        adapter.active = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.active = True


class HfAdapters:
    """The adapters of one model, not yet sharded; freezes the rest of it. `names` are of weights that have one."""

    def __init__(self, hf: Any, config: LoraConfig, *, seed: int) -> None:
        self.scale, self._config, self._active = config.alpha / config.dim, config, True
        linears = {
            f"model.{name}": module for name, module in hf.model.named_modules() if isinstance(module, torch.nn.Linear)
        }
        chosen = lora_modules(linears, config)
        hf.requires_grad_(False)
        self.names = {f"{name}.weight" for name in chosen}
        for name in chosen:
            of = linears[name]
            settings: dict[str, Any] = {"bias": False, "device": of.weight.device, "dtype": of.weight.dtype}
            of.lora_A = torch.nn.Linear(of.in_features, config.dim, **settings)
            of.lora_B = torch.nn.Linear(config.dim, of.out_features, **settings)
            with torch.no_grad():
                of.lora_A.weight.copy_(drawn((config.dim, of.in_features), config.lora_A_init, f"{seed}.{name}"))
                of.lora_B.weight.zero_()
            of.register_forward_hook(self._added)

    def _added(self, linear: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if not self._active:
            return output
        first = self._config.dropout_position == "pre"
        states = _dropped(inputs[0], self._config.dropout) if first else inputs[0]
        added = linear.lora_B(linear.lora_A(states))
        return torch.add(output, added if first else _dropped(added, self._config.dropout), alpha=self.scale)

    @contextmanager
    def off(self) -> Iterator[None]:
        """The model that they were added to."""
        self._active = False
        try:
            yield
        finally:
            self._active = True
