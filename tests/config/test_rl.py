"""What the sections of an RL config say of themselves."""

from __future__ import annotations

import pytest

from nemotron_steps.config.schema.rl import RlConfig


@pytest.mark.parametrize(
    ("values", "batch"),
    [
        ({}, 256),
        ({"grpo": {"num_prompts_per_step": 4}}, 32),
        ({"grpo": {"num_generations_per_prompt": 4}}, 128),
        ({"policy": {"train_global_batch_size": None}, "grpo": {"num_prompts_per_step": 2}}, 16),
        ({"policy": {"train_global_batch_size": 64}}, 64),
    ],
)
def test_rollouts_of_a_step_make_one_update_unless_a_batch_is_given(values, batch):
    assert RlConfig.model_validate(values).policy.train_global_batch_size == batch
