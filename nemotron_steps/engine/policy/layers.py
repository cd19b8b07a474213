"""Parts of a layer on megatron-core's tensor-parallel linears, over flat tokens: norm, linears with adapters, MLP."""

from typing import Any

import torch
from torch import Tensor

from nemotron_steps.engine.kernels.cpu_layers import feed_forward, runs_natively
from nemotron_steps.engine.kernels.fused import activation, add_rms_norm, rms_norm
from nemotron_steps.engine.kernels.linear import linear
from nemotron_steps.engine.policy.distributed.parallel_dims import device
from nemotron_steps.models.megatron_core import load_megatron_core

load_megatron_core()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear  # noqa: E402


class RmsNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with the constructor megatron-core's specs call."""

    eps: float

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, device=device(), dtype=config.params_dtype)

    def forward(self, states: Tensor) -> Tensor:
        """[…, hidden_size] → the same shape."""
        return rms_norm(states, self.weight, self.eps)

    def after_adding(self, states: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor]:
        """states + added (None: nothing), and its norm."""
        if added is None:
            return states, self(states)
        return add_rms_norm(states, added, self.weight, self.eps)


class Mlp(torch.nn.Module):
    """linear_fc2 · activation(linear_fc1 · x), without biases; `width`: inner size of the whole MLP."""

    def __init__(self, config: Any, kind: str, width: int) -> None:
        super().__init__()
        self.activate, rows = activation(kind)
        self.gated = rows == 2
        ranks = parallel_state.get_tensor_model_parallel_group()
        settings: dict[str, Any] = {"config": config, "bias": False, "skip_bias_add": True, "tp_group": ranks}
        self.linear_fc1 = ColumnParallelLinear(
            config.hidden_size, rows * width, init_method=config.init_method, gather_output=False, **settings
        )
        self.linear_fc2 = RowParallelLinear(
            width, config.hidden_size, init_method=config.output_layer_init_method, input_is_parallel=True, **settings
        )

    def forward(self, hidden: Tensor, *_: Any) -> Tensor:
        """[T, 1, hidden] → the same shape."""
        return row_linear(self.linear_fc2, self.activate(column_linear(self.linear_fc1, hidden)))

    def after_norm(self, hidden: Tensor, norm: RmsNorm, *_: Any) -> Tensor:
        """hidden + MLP of its norm, on one rank, in float32 on CPU."""
        if not runs_natively(hidden):
            return hidden + self(norm(hidden))
        up, down = self.linear_fc1.weight, self.linear_fc2.weight
        return feed_forward(hidden, norm.weight, up, down, norm.eps, gated=self.gated)


def column_linear(module: Any, hidden: Tensor) -> Tensor:
    """megatron-core's column-parallel linear, and its adapter; on one rank a plain one."""
    plain = module.tp_group.size() == 1
    return _adapted(module, linear(hidden, module.weight, module.bias) if plain else module(hidden)[0], hidden)


def row_linear(module: Any, hidden: Tensor) -> Tensor:
    """megatron-core's row-parallel linear, and its adapter; on one rank a plain one."""
    plain = module.tp_group.size() == 1
    return _adapted(module, linear(hidden, module.weight) if plain else module(hidden)[0], hidden)


def _adapted(module: Any, output: Tensor, states: Tensor) -> Tensor:
    adapter = getattr(module, "adapter", None)  # lora.py
    return output if adapter is None else adapter.added_to(output, states)
