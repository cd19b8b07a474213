"""What one rank keeps of layers that are cut over several, and what its passes need beside it: by hand."""

from __future__ import annotations

from typing import Any

import pytest

from nemotron_steps.config.layout.memory.activations import (
    kept,
)
from nemotron_steps.config.layout.memory.settings import MemorySettings
from nemotron_steps.config.layout.memory.shape import ModelShape
from tests.config.layout.memory.shapes import QWEN3_8B, QWEN3_30B_A3B, SUPER_120B


def settings_of(tensor: int, *, sequence_parallel: bool = True, **values: Any) -> MemorySettings:
    config = {
        "policy.megatron_cfg.tensor_model_parallel_size": tensor,
        "policy.megatron_cfg.sequence_parallel": sequence_parallel,
        "cluster.gpus_per_node": 8,
        **values,
    }
    return MemorySettings.read(config.get)


def shape_of(config: dict[str, Any]) -> ModelShape:
    shape = ModelShape.read(config)
    assert shape is not None
    return shape


@pytest.mark.parametrize(
    ("config", "layer"),
    [(QWEN3_8B, "*-"), (QWEN3_30B_A3B, "*E"), (SUPER_120B, "M"), (SUPER_120B, "E")],
    ids=["dense", "mixture", "mamba", "latent experts"],
)
def test_tensor_and_sequence_parallel_ranks_keep_their_part_of_everything(config, layer):
    shape = shape_of(config)
    whole, part = (kept(shape, layer, settings_of(tensor)).per_token for tensor in (1, 4))
    assert part == pytest.approx(whole / 4)
