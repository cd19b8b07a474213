"""What happens to a reward between the environment and the baseline: scaling and length shaping.

Pure functions on float64 [N] tensors, one entry a rollout. Not here: rewards themselves (environments), the length
terms of a judged comparison (environments), brevity on request (rollouts/low_effort.py), advantages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from nemotron_steps.config.schema.grpo import RewardScalingConfig, RewardShapingConfig


def scale_rewards(rewards: torch.Tensor, config: RewardScalingConfig) -> torch.Tensor:
    """Clamp to [source_min, source_max], then map that interval linearly onto [target_min, target_max].

    Args:
        rewards: [N].
        config: `grpo.reward_scaling`; returned unchanged when it is off. Its source interval is not empty.
    """
    if not config.enabled:
        return rewards
    width = config.source_max - config.source_min
    share = (rewards.clamp(config.source_min, config.source_max) - config.source_min) / width
    return config.target_min + share * (config.target_max - config.target_min)


def shape_rewards(
    rewards: torch.Tensor,
    lengths: torch.Tensor,
    truncated: torch.Tensor,
    config: RewardShapingConfig,
    *,
    max_response_length: int,
) -> torch.Tensor:
    """Length-dependent shaping: DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13), or a factor on the rewards
    of truncated samples.

    The punishment is min(-(len - (L_max - buffer)) / buffer x penalty, 0): 0 up to L_max - buffer, then falling
    linearly, -penalty at L_max. With `stop_properly_penalty_coef` c the reward of a truncated sample is multiplied by c
    instead: the two answer the same question.

    Args:
        rewards: [N], already scaled.
        lengths: [N] tokens of the first assistant message.
        truncated: bool [N].
        config: `grpo.reward_shaping`; rewards are returned unchanged when it is off.
        max_response_length: L_max where the config leaves it open (the generator's max_new_tokens).
    """
    if not config.enabled:
        return rewards
    if config.stop_properly_penalty_coef is not None:
        return torch.where(truncated, rewards * config.stop_properly_penalty_coef, rewards)
    limit = config.max_response_length if config.max_response_length is not None else max_response_length
    exceeded = lengths.double() - (limit - config.overlong_buffer_length)
    return rewards + (-exceeded / config.overlong_buffer_length * config.overlong_buffer_penalty).clamp(max=0.0)
