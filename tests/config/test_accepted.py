"""What the rules over several keys let through: each neighbour of what they refuse, up to the limit itself."""

from __future__ import annotations

from typing import Any

import pytest

from nemotron_steps.config.schema.data_prep import RlPrepConfig, SftPrepConfig
from nemotron_steps.config.schema.dpo import DpoConfig
from nemotron_steps.config.schema.opd import OpdConfig
from nemotron_steps.config.schema.rl import RlConfig
from nemotron_steps.config.schema.sft import SftConfig
from nemotron_steps.config.schema.swe_tasks import SweTasksConfig
from nemotron_steps.config.schema.tool_preferences import ToolPreferencePrepConfig
from nemotron_steps.config.validation import validate
from tests.config.test_rules import CORRECTED, DTENSOR, GDPO, HYBRID, LINEAR, PLUS_PLUS, TASKS, TIS, composed

MEGATRON, LORA = "policy.megatron_cfg", "policy.dtensor_cfg.lora_cfg"
PEFT = f"{MEGATRON}.peft"
JUDGE = "env.nemo_gym.judge_model.responses_api_models.vllm_model"
SHAPING = "grpo.reward_shaping"
TRUNCATED = "loss_fn.truncated_importance_sampling"
EACH = {"name": LINEAR["name"]}
APART = "on_policy_distillation.non_colocated_teachers"

RL: list[dict[str, Any]] = [
    {"grpo.reward_scaling.source_min": 1, "grpo.reward_scaling.source_max": 1},
    {f"{SHAPING}.overlong_buffer_length": 64, f"{SHAPING}.overlong_buffer_penalty": 2,
     f"{SHAPING}.max_response_length": 64},
    {"grpo.low_effort.string": "brief", "grpo.low_effort.weight": 0.2},
    {"grpo.low_effort.string": "", "grpo.low_effort.upper_bound_tokens": 3000},
    {f"{SHAPING}.enabled": True},
    {"grpo.advantage_clip_low": 5, "grpo.advantage_clip_high": 5},
    {"grpo.advantage_clip_low": 5},
    {"grpo.advantage_clip_high": -5},
    {"grpo.val_start_at": 0},
    {"policy.generation.max_new_tokens": 8192, "policy.max_total_sequence_length_end": 8192},
    {"grpo.val_start_at": 10, "grpo.val_period": 1},
    {"grpo.epsilon_filtering.enabled": True, "grpo.reward_scaling.enabled": True},
    {"grpo.epsilon_filtering.enabled": True, "grpo.reward_scaling.target_min": -1},
    {"grpo.reward_scaling.enabled": True, "grpo.reward_scaling.target_max": 2},
    GDPO,
    {**GDPO, f"{SHAPING}.enabled": True, f"{SHAPING}.stop_properly_penalty_coef": 0},
    {**GDPO, f"{SHAPING}.stop_properly_penalty_coef": 0.5},
    {**GDPO, "grpo.adv_estimator.components": ["a", "b"], "grpo.adv_estimator.reward_weights": [1, 0.5]},
    PLUS_PLUS,
    {**PLUS_PLUS, "grpo.adv_estimator.minus_baseline": False},
    {"grpo.normalize_rewards": False, "grpo.use_leave_one_out_baseline": False},
    {"grpo.penalize_invalid_tool_call": True, "grpo.invalid_tool_call_advantage": 0},
    {"grpo.penalize_invalid_tool_call": True, "grpo.invalid_tool_call_strategy": "mask"},
    {"grpo.penalize_malformed_thinking": True, "grpo.malformed_thinking_advantage": 0},
    {"grpo.invalid_tool_call_advantage": -1, "grpo.malformed_thinking_advantage": -1},
    {"grpo.penalize_invalid_tool_call": False, "grpo.penalize_malformed_thinking": False},
    {"reward_penalties.penalize_unwanted_tokens": True, "reward_penalties.token_ids.unwanted": [2]},
    {"reward_penalties.penalize_malformed_think_tag": True, "reward_penalties.token_ids.think_open": 0,
     "reward_penalties.token_ids.think_close": 13},
    {"reward_penalties.penalize_empty_final_answer": True},
    {"loss_fn.sequence_level_importance_ratios": True, "loss_fn.token_level_loss": False},
    {"loss_fn.token_level_loss": False},
    {"loss_fn.force_on_policy_ratio": True},
    {"loss_fn.disable_ppo_ratio": True},
    {"loss_fn.disable_ppo_ratio": True, "loss_fn.token_level_loss": False},
    {"loss_fn.ratio_clip_c": 3.0},
    {"loss_fn.use_cispo": True},
    TIS,
    CORRECTED,
    {**TIS, f"{TRUNCATED}_ratio_min": 5},
    {**TIS, f"{TRUNCATED}_type": "icepop", f"{TRUNCATED}_ratio_min": 0},
    {**TIS, f"{TRUNCATED}_type": "seq-mask-tis", f"{TRUNCATED}_ratio_min": 0.5},
    {**TIS, "loss_fn.sequence_level_importance_ratios": True, "loss_fn.token_level_loss": False},
    {"loss_fn.use_kl_in_reward": True, "loss_fn.reference_policy_kl_penalty": 0.1},
    {"loss_fn.use_on_policy_kl_approximation": True, "loss_fn.reference_policy_kl_penalty": 0.1},
    {f"{JUDGE}.backend": "http", f"{JUDGE}.base_url": "http://judge/v1"},
    {f"{JUDGE}.backend": "http", f"{JUDGE}.base_url": ["http://one/v1", "http://two/v1"]},
    {f"{JUDGE}.backend": "vllm", f"{JUDGE}.tensor_parallel_size": 2},
    {"env.should_use_nemo_gym": False, "env.environment": "mcqa"},
    {"env.environment": "mcqa"},
    {"policy.train_global_batch_size": 256, "loss_fn.force_on_policy_ratio": True},
    {"policy.train_global_batch_size": 128},
    {"policy.train_global_batch_size": 1},
    {"grpo.async_grpo.enabled": True},
    {"policy.generation.top_p": 1, "policy.generation.top_k": 0, "loss_fn.reference_policy_kl_penalty": 0.1},
    {"policy.sequence_packing.enabled": True, "policy.sequence_packing.train_mb_tokens": 4096,
     "policy.sequence_packing.logprob_mb_tokens": 4096, "policy.sequence_packing.sequence_length_round": 100},
    {"policy.dynamic_batching.enabled": True, "policy.dynamic_batching.train_mb_tokens": 4100, **DTENSOR,
     "policy.max_total_sequence_length": 4090, "policy.dynamic_batching.sequence_length_round": 100},
    {"policy.sequence_packing.train_mb_tokens": 1, "policy.dynamic_batching.logprob_mb_tokens": 1},
    {"policy.sequence_packing.enabled": True, "policy.sequence_packing.train_mb_tokens": 4096,
     "policy.max_total_sequence_length_end": 64},
    {f"{MEGATRON}.mtp_loss_scaling_factor": 0},
    {f"{MEGATRON}.mtp_num_layers": 1},
    {f"{MEGATRON}.scheduler.lr_decay_style": "linear"},
    {f"{MEGATRON}.scheduler.lr_decay_style": "cosine", f"{MEGATRON}.scheduler.lr_decay_iters": 6,
     f"{MEGATRON}.scheduler.lr_warmup_iters": 5},
    {f"{MEGATRON}.scheduler.lr_warmup_init": 1e-7, f"{MEGATRON}.scheduler.lr_warmup_iters": 1},
    {f"{MEGATRON}.optimizer.exp_avg_dtype": "bfloat16", f"{MEGATRON}.optimizer.exp_avg_sq_dtype": "bfloat16",
     f"{MEGATRON}.optimizer.use_precision_aware_optimizer": True, f"{MEGATRON}.optimizer.adam_beta2": 1 - 2**-8},
    {f"{MEGATRON}.optimizer.exp_avg_dtype": "bfloat16", f"{MEGATRON}.optimizer.use_precision_aware_optimizer": True},
    {"policy.generation.vllm_cfg.expert_parallel_size": 2, "policy.generation.vllm_cfg.tensor_parallel_size": 2},
    {"policy.router_replay.enabled": True},
    {"policy.generation.vllm_cfg.expose_http_server": True},
    {"policy.scheduler": [LINEAR], **DTENSOR},
    {"policy.scheduler": [LINEAR, LINEAR, {"milestones": [5]}], **DTENSOR},
    {"policy.scheduler": [EACH, EACH, EACH, {"milestones": [5, 6]}], **DTENSOR},
    {"policy.optimizer": {"kwargs": {"lr": 1e-5}}, **DTENSOR},
    {**DTENSOR, f"{MEGATRON}.enabled": False},
    {**DTENSOR, "policy.dtensor_cfg.tensor_parallel_size": 2, "policy.dtensor_cfg.cpu_offload": True},
    {f"{PEFT}.enabled": True},
    {f"{PEFT}.enabled": True, f"{PEFT}.target_modules": ["linear_qkv"], f"{PEFT}.dim": 8},
    {f"{PEFT}.enabled": True, f"{PEFT}.exclude_modules": ["linear_qkv"]},
    {f"{PEFT}.enabled": True, f"{MEGATRON}.tensor_model_parallel_size": 2,
     f"{MEGATRON}.activation_checkpointing": True},
    {**DTENSOR, f"{LORA}.enabled": True, "policy.dtensor_cfg.activation_checkpointing": True},
    {**DTENSOR, f"{LORA}.enabled": True, f"{LORA}.match_all_linear": False, f"{LORA}.target_modules": ["q_proj"]},
]  # fmt: skip
TRAINED: list[dict[str, Any]] = [
    {f"{PEFT}.enabled": True, f"{PEFT}.dropout": 0.1, f"{PEFT}.dropout_position": "post"},
    {**DTENSOR, f"{LORA}.enabled": True, f"{LORA}.dropout": 0.1},
    {"policy.max_total_sequence_length": 4096, "policy.sequence_packing.enabled": True,
     "policy.sequence_packing.train_mb_tokens": 64},
]  # fmt: skip
OTHERS: list[tuple[Any, dict[str, Any]]] = [
    *((schema, values) for schema in (SftConfig, DpoConfig) for values in TRAINED),
    (DpoConfig, {"dpo.preference_loss_weight": 0, "dpo.sft_loss_weight": 0.1}),
    (DpoConfig, {"dpo.sft_loss_weight": 0}),
    (OpdConfig, {"loss_fn.kl_type": "mixed", "loss_fn.mixed_kl_weight": 0.2}),
    (OpdConfig, {"loss_fn.kl_type": "reverse", "loss_fn.zero_outside_topk": True}),
    (OpdConfig, {"on_policy_distillation.topk_logits_k": None, "on_policy_distillation.offload": False}),
    (OpdConfig, {f"{APART}.enabled": True}),
    (OpdConfig, {f"{APART}.enabled": True, f"{APART}.default_teacher_cfg.num_nodes": 2,
                 f"{APART}.teacher_overrides": {"a": {"num_nodes": 3}}}),
    (OpdConfig, {"grpo.adv_estimator.name": "opd"}),
    (OpdConfig, {"grpo.async_grpo.enabled": True, "grpo.overlong_filtering": True, "grpo.val_period": 5}),
    (RlPrepConfig, {"jsonl.path": "x", "sample": 9}),
    (RlPrepConfig, {"input_path": "x", "prompt_length": {"tokenizer": "x", "max_tokens": 9}}),
    (RlPrepConfig, {"blend_path": "x", "rows.train": 9}),
    (RlPrepConfig, {"reasoning_gym.tasks": TASKS, "rows.train": 9, "reasoning_gym.heldout_fraction": 0.89}),
    (SftPrepConfig, {"input_path": "x", "reasoning.strip_share": 0.5, "reasoning.truncate_share": 0.5}),
    (SftPrepConfig, {"input_path": "x", "kind": "comparisons"}),
    (SftPrepConfig, {"swe": {}, "rows.train": 9}),
    (SftPrepConfig, {"swe.share": 0.5, "reasoning_gym.tasks": TASKS, "rows.train": 9}),
    (ToolPreferencePrepConfig, {"jsonl.path": "x", "sample": 9}),
    (ToolPreferencePrepConfig, {"tool_tasks.offered": 3, "rows.train": 9}),
    (SweTasksConfig, {"packages.path": "x", "kind": "steps"}),
    (SweTasksConfig, {"made_up": {}, "rows.train": 9, "kind": "steps"}),
    (SweTasksConfig, {"jsonl.path": "x", "sample": 9}),
    (SftConfig, {"from_scratch.num_hidden_layers": 5, "from_scratch.rope_theta": 5.0}),
    (SftConfig, {**HYBRID, "from_scratch.hybrid.n_groups": 8}),
]  # fmt: skip


@pytest.mark.parametrize("values", RL, ids=str)
def test_an_rl_config_may_say_what_has_a_meaning(values: dict[str, Any]) -> None:
    validate(composed(values), RlConfig)


@pytest.mark.parametrize(("schema", "values"), OTHERS, ids=str)
def test_other_configs_may_as_well(schema: Any, values: dict[str, Any]) -> None:
    validate(composed(values), schema)
