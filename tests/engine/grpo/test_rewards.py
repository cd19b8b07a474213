from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemotron_steps.config.schema.rl import LowEffortConfig, RewardScalingConfig, RewardShapingConfig
from nemotron_steps.engine.grpo.rewards import overlong_penalty, scale_rewards, shape_rewards
from nemotron_steps.engine.rollouts.low_effort import asks_for_low_effort, low_effort_rewards
from nemotron_steps.engine.schedules import low_effort_fraction


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_scaling_clamps_then_maps_linearly() -> None:
    config = RewardScalingConfig(enabled=True, source_min=1.0, source_max=5.0, target_min=-1.0, target_max=1.0)
    assert scale_rewards(f64(0.0, 1.0, 2.0, 3.0, 5.0, 9.0), config).tolist() == [-1.0, -1.0, -0.5, 0.0, 1.0, 1.0]
    clipped = RewardScalingConfig(enabled=True, source_max=5.0, target_max=5.0)  # as rlhf's strategy says
    assert scale_rewards(f64(-0.5, 0.0, 3.2, 5.0, 5.9), clipped).tolist() == [0.0, 0.0, 3.2, 5.0, 5.0]
    raw = f64(0.3, 7.0)
    assert scale_rewards(raw, RewardScalingConfig()) is raw


@given(reward=st.floats(-10, 10), other=st.floats(-10, 10))
def test_scaling_is_monotone_and_stays_in_the_target_interval(reward: float, other: float) -> None:
    config = RewardScalingConfig(enabled=True, source_min=-2.0, source_max=3.0, target_min=0.0, target_max=10.0)
    a, b = scale_rewards(f64(reward, other), config).tolist()
    assert 0.0 <= a <= 10.0
    assert (a <= b) if reward <= other else (a >= b)


def test_overlong_penalty_grows_over_the_buffer() -> None:
    lengths = torch.tensor([50, 80, 85, 90, 100, 110])
    got = overlong_penalty(lengths, max_response_length=100, buffer_length=20, penalty=2.0)
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


def test_low_effort_rewards_brevity_of_right_answers_and_punishes_length_of_all() -> None:
    config = LowEffortConfig(enabled=True)
    rewards = f64(1.0, 0.0, 1.0, 0.0, 1.0)
    lengths = torch.tensor([1500, 0, 4500, 6000, 10])
    asked = torch.tensor([True, True, True, True, False])
    # l = .2 (1 - len/3000): .1, .2, -.1, -.2
    assert low_effort_rewards(rewards, lengths, asked, config).tolist() == pytest.approx([1.1, 0.0, 0.9, -0.2, 1.0])
    heavy = config.model_copy(update={"weight": 3.0})
    got = low_effort_rewards(f64(1.0), torch.tensor([0]), torch.tensor([True]), heavy)
    assert got.item() == pytest.approx(2.0)  # l is capped at 1


def test_low_effort_prompts_are_a_reproducible_share_of_the_named_environments() -> None:
    config = LowEffortConfig(enabled=True)
    ids = [f"step{i}/0" for i in range(20_000)]

    def chosen(environment: str, seed: int = 1, fraction: float = 0.02) -> set[str]:
        return {i for i in ids if asks_for_low_effort(i, environment, config, fraction=fraction, seed=seed)}

    assert 0.016 < len(chosen("mcqa")) / len(ids) < 0.024
    assert chosen("mcqa") == chosen("mcqa")
    assert chosen("mcqa") != chosen("mcqa", seed=2)
    assert chosen("mcqa", fraction=0.01) < chosen("mcqa")  # annealing the share drops prompts, it swaps none
    assert not chosen("genrm_compare") and not chosen("mcqa", fraction=0.0)


def test_low_effort_leaves_an_environment_out_by_the_end_of_the_run() -> None:
    config = LowEffortConfig(fraction_end=0.01, environments_end=("math_with_judge", "mcqa"))
    assert [config.share_at_end(name) for name in ("mcqa", "code_gen")] == [0.01, 0.0]
    assert low_effort_fraction(2, 5, config.fraction, config.share_at_end("code_gen")) == pytest.approx(0.01)
    everywhere = LowEffortConfig(fraction_end=0.01)
    assert everywhere.share_at_end("code_gen") == 0.01 and LowEffortConfig().share_at_end("code_gen") is None
