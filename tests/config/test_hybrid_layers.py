"""What config.json says of a hybrid's layers, in either generation of its keys."""

from __future__ import annotations

import math
from typing import Any

import pytest

from nemotron_steps.config.families import bounds_time_steps, pattern_of, time_step_limit


@pytest.mark.parametrize(
    ("config", "pattern"),
    [
        ({}, ""),
        ({"hybrid_override_pattern": "ME*-"}, "ME*-"),
        ({"hybrid_override_pattern": "MX"}, "M?"),
        ({"hybrid_override_pattern": 4}, ""),
        ({"layers_block_type": ["mamba", "linear_attention", "moe", "attention", "full_attention", "mlp"]}, "MME**-"),
        ({"layers_block_type": ("mamba", "rnn", None)}, "M??"),
        ({"layers_block_type": [], "hybrid_override_pattern": "M"}, ""),
        ({"layers_block_type": None, "hybrid_override_pattern": "M"}, "M"),
        ({"layers_block_type": ["moe"], "hybrid_override_pattern": "M"}, "E"),
    ],
)
def test_layers_are_read_from_a_list_of_names_or_else_a_string(config: dict[str, Any], pattern: str) -> None:
    assert pattern_of(config) == pattern
    renamed = {"a": config.get("layers_block_type"), "b": config.get("hybrid_override_pattern")}
    assert pattern_of(renamed, "a", "b") == pattern


@pytest.mark.parametrize(
    ("config", "limit", "bounded"),
    [
        ({}, (0.0, math.inf), False),
        ({"time_step_limit": [0.0, {"__float__": "Infinity"}]}, (0.0, math.inf), False),
        ({"time_step_limit": [0.1, {"__float__": "Infinity"}]}, (0.1, math.inf), True),
        ({"time_step_limit": ["0", 5]}, (0.0, 5.0), True),
        ({"time_step_limit": [0.1, 1], "mamba_dt_limit": [0.2, 2]}, (0.2, 2.0), True),
        ({"time_step_limit": [], "mamba_dt_limit": None}, (0.0, math.inf), False),
    ],
)
def test_time_steps_have_a_least_and_a_greatest(
    config: dict[str, Any], limit: tuple[float, float], bounded: bool
) -> None:
    assert time_step_limit(config) == limit
    assert bounds_time_steps(limit) is bounded
