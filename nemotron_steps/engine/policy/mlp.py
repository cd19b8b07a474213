"""An MLP over flat tokens on megatron-core's tensor-parallel linears: a hybrid's own layers, and shared experts."""

from __future__ import annotations

from typing import Any

import torch

from nemotron_steps.engine.policy.attention.attention import column_linear, row_linear
from nemotron_steps.engine.policy.kernels.fused import activation
from nemotron_steps.models.megatron_core import load_megatron_core

load_megatron_core()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear  # noqa: E402


class FlatMlp(torch.nn.Module):
    """linear_fc2 · activation(linear_fc1 · x), without biases.

    Args:
        config: megatron-core's.
        kind: of activation, as `kernels.fused.activation` knows it.
        width: inner size of the whole MLP.
    """

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

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, 1, hidden] → the same shape."""
        return row_linear(self.linear_fc2, self.activate(column_linear(self.linear_fc1, hidden)))
