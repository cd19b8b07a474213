"""What distillation would ignore is refused with the config, and every hint mends what it is for."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from nemotron_steps.config.schema.opd import OpdConfig
from nemotron_steps.config.schema.rl import RlConfig
from nemotron_steps.errors import ConfigError
from tests.config.test_rules import composed

BROKEN: list[dict[str, Any]] = [
    {"grpo.normalize_rewards": False},
    {"grpo.use_dynamic_sampling": True},
    {"grpo.reward_shaping.enabled": True},
    {"grpo.low_effort.penalty": 2.0},
    {"grpo.adv_estimator.name": "reinforce_plus_plus"},
    {"grpo.advantage_clip_low": -5},
    {"grpo.advantage_clip_high": 5},
    {"grpo.val_start_at": 10},
    {"grpo.use_leave_one_out_baseline": False},
    {"grpo.reward_scaling.target_max": 2},
    {"grpo.epsilon_filtering.epsilon": 0.1},
    {"grpo.invalid_tool_call_advantage": -1},
    {"grpo.malformed_thinking_advantage": -1},
    {"grpo.penalize_invalid_tool_call": False},
    {"grpo.penalize_malformed_thinking": False},
    {"grpo.adv_estimator.name": "opd", "loss_fn.zero_outside_topk": True},
    {"grpo.adv_estimator.name": "opd", "loss_fn.mixed_kl_weight": 0.2},
    {"loss_fn.force_on_policy_ratio": True, "policy.train_global_batch_size": 256},
    {"loss_fn.force_on_policy_ratio": True},
    {"loss_fn.reference_policy_kl_penalty": 0.1},
    {"loss_fn.ratio_clip_max": 0.5},
    {"loss_fn.kl_type": "forward", "loss_fn.mixed_kl_weight": 0.2},
    {"loss_fn.zero_outside_topk": True, "on_policy_distillation.topk_logits_k": None},
    {"on_policy_distillation.non_colocated_teachers.default_teacher_cfg.num_nodes": 2},
    {"on_policy_distillation.non_colocated_teachers.teacher_overrides": {"a": {"num_nodes": 2}}},
    {"on_policy_distillation.non_colocated_teachers.enabled": True, "on_policy_distillation.offload": False},
    {"on_policy_distillation.non_colocated_teachers.enabled": True, "on_policy_distillation.topk_logits_k": None},
    {"grpo.adv_estimator.name": "opd", "loss_fn.kl_type": "forward"},
    {"grpo.adv_estimator.name": "opd", "on_policy_distillation.topk_logits_k": 8},
    {"grpo.adv_estimator.name": "opd", "grpo.normalize_rewards": False},
    {"reward_penalties.penalize_empty_final_answer": True},
    {"policy.dtensor_cfg.enabled": True},
    {"policy.generation.temperature": 0.7},
    {"policy.generation.top_p": 0.9},
    {"policy.generation.top_k": 20},
]


@pytest.mark.parametrize("broken", BROKEN, ids=str)
def test_what_would_be_ignored_is_refused_and_the_hint_mends_it(broken: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        composed(broken).model(OpdConfig)
    error = caught.value
    assert not error.problems and error.where in {f"override '{key}'" for key in broken}
    for hint in error.hints:
        key, _, value = hint.partition("=")
        assert composed({**broken, key: yaml.safe_load(value)}).model(OpdConfig)


def test_one_answer_a_prompt_is_enough_and_a_kl_has_three_kinds() -> None:
    one = {"grpo.num_generations_per_prompt": 1}
    assert composed(one).model(OpdConfig)
    with pytest.raises(ConfigError):
        composed(one).model(RlConfig)
    with pytest.raises(ConfigError, match="needs teachers"):
        composed({"grpo.adv_estimator.name": "opd"}).model(RlConfig)
    gradient = {"loss_fn.disable_ppo_ratio": True, "grpo.advantage_clip_low": -5, "grpo.advantage_clip_high": 5}
    assert composed({**one, **gradient, "grpo.adv_estimator.name": "opd"}).model(OpdConfig)
    with pytest.raises(ConfigError, match="forward"):
        composed({"loss_fn.kl_type": "backward"}).model(OpdConfig)
