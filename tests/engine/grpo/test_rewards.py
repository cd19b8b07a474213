from __future__ import annotations

import pytest
import torch

from nemotron_steps.config.schema.grpo import RewardScalingConfig, RewardShapingConfig
from nemotron_steps.engine.grpo.rewards import scale_rewards, shape_rewards


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_scaling_clamps_then_maps_linearly() -> None:
    config = RewardScalingConfig(enabled=True, source_min=1.0, source_max=5.0, target_min=-1.0, target_max=1.0)
    assert scale_rewards(f64(0.0, 1.0, 2.0, 3.0, 5.0, 9.0), config).tolist() == [-1.0, -1.0, -0.5, 0.0, 1.0, 1.0]
    clipped = RewardScalingConfig(enabled=True, source_max=5.0, target_max=5.0)  # as rlhf's strategy says
    assert scale_rewards(f64(-0.5, 0.0, 3.2, 5.0, 5.9), clipped).tolist() == [0.0, 0.0, 3.2, 5.0, 5.0]
    raw = f64(0.3, 7.0)
    assert scale_rewards(raw, RewardScalingConfig()) is raw


def test_overlong_penalty_grows_over_the_buffer() -> None:
    lengths = torch.tensor([50, 80, 85, 90, 100, 110])
    config = RewardShapingConfig(enabled=True, overlong_buffer_length=20, overlong_buffer_penalty=2.0)
    got = shape_rewards(torch.zeros(6).double(), lengths, torch.zeros(6).bool(), config, max_response_length=100)
    assert got.tolist() == pytest.approx([0.0, 0.0, -0.5, -1.0, -2.0, -3.0])


def test_shaping_takes_the_limit_from_the_config_or_the_generator() -> None:
    config = RewardShapingConfig(enabled=True, overlong_buffer_length=20, overlong_buffer_penalty=1.0)
    lengths, truncated = torch.tensor([90]), torch.tensor([False])
    assert shape_rewards(f64(1.0), lengths, truncated, config, max_response_length=100).item() == pytest.approx(0.5)
    own = config.model_copy(update={"max_response_length": 95})
    assert shape_rewards(f64(1.0), lengths, truncated, own, max_response_length=100).item() == pytest.approx(0.25)


def test_stop_properly_scales_truncated_rewards_only_and_replaces_the_length_penalty() -> None:
    config = RewardShapingConfig(enabled=True, stop_properly_penalty_coef=0.25)
    lengths, truncated = torch.tensor([100, 100]), torch.tensor([True, False])
    got = shape_rewards(f64(0.8, 0.8), lengths, truncated, config, max_response_length=100)
    assert got.tolist() == pytest.approx([0.2, 0.8])
    off = shape_rewards(f64(0.8, 0.8), lengths, truncated, RewardShapingConfig(), max_response_length=100)
    assert off.tolist() == [0.8, 0.8]
