"""Settings without a meaning together, or that would be ignored: refused with the config, with what mends it."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from nemotron_steps.config.compose import ComposedConfig
from nemotron_steps.config.schema.data_prep import PreferencePrepConfig, RlPrepConfig, SftPrepConfig
from nemotron_steps.config.schema.dpo import DpoConfig
from nemotron_steps.config.schema.grpo import LossFnConfig
from nemotron_steps.config.schema.opd import OpdConfig
from nemotron_steps.config.schema.rl import RlConfig, parse_duration
from nemotron_steps.config.schema.sft import SftConfig
from nemotron_steps.config.schema.swe_tasks import SweTasksConfig
from nemotron_steps.config.schema.tool_preferences import ToolPreferencePrepConfig
from nemotron_steps.config.validation import validate
from nemotron_steps.errors import ConfigError

ON_POLICY = {"loss_fn.force_on_policy_ratio": True}
CORRECTED = {"loss_fn.use_importance_sampling_correction": True}
TIS = {
    **CORRECTED,
    "loss_fn.truncated_importance_sampling_type": "tis",
    "loss_fn.truncated_importance_sampling_ratio": 5,
}
DTENSOR = {"policy.dtensor_cfg.enabled": True}
TASKS = [{"dataset": "basic_arithmetic"}]
GDPO = {"grpo.adv_estimator.name": "gdpo", "grpo.adv_estimator.components": ["right", "format"]}
HYBRID = {"from_scratch.architecture": "nemotron_h", "from_scratch.hybrid.pattern": "ME*"}
PLUS_PLUS = {"grpo.adv_estimator.name": "reinforce_plus_plus"}

LOSS: list[dict[str, Any]] = [
    {"loss_fn.sequence_level_importance_ratios": True},
    {"loss_fn.disable_ppo_ratio": True, **ON_POLICY},
    {"loss_fn.disable_ppo_ratio": True, "loss_fn.ratio_clip_c": 3.0},
    {"loss_fn.ratio_clip_c": 3.0, **ON_POLICY},
    {
        "loss_fn.disable_ppo_ratio": True,
        "loss_fn.sequence_level_importance_ratios": True,
        "loss_fn.token_level_loss": False,
    },
    {"loss_fn.use_cispo": True, "loss_fn.token_level_loss": False},
    {"loss_fn.use_cispo": True, **ON_POLICY},
    {
        "loss_fn.truncated_importance_sampling_type": "tis",
        "loss_fn.truncated_importance_sampling_ratio": 5.0,
    },
    {**CORRECTED, "loss_fn.truncated_importance_sampling_type": "tis"},
    {**CORRECTED, "loss_fn.truncated_importance_sampling_ratio": 5.0},
    {**TIS, "loss_fn.truncated_importance_sampling_type": "icepop"},
    {**TIS, "loss_fn.truncated_importance_sampling_ratio_min": 9.0},
    {
        **TIS,
        "loss_fn.truncated_importance_sampling_type": "seq-mask-tis",
        "loss_fn.truncated_importance_sampling_ratio_min": 0.9,
        "loss_fn.sequence_level_importance_ratios": True,
        "loss_fn.token_level_loss": False,
    },
    {"loss_fn.use_kl_in_reward": True},
    {
        "loss_fn.use_kl_in_reward": True,
        "loss_fn.reference_policy_kl_penalty": 0.1,
        "loss_fn.use_on_policy_kl_approximation": True,
    },
]
GRPO: list[dict[str, Any]] = [
    {"grpo.reward_scaling.enabled": True, "grpo.reward_scaling.source_min": 1, "grpo.reward_scaling.source_max": 1},
    {"grpo.reward_shaping.stop_properly_penalty_coef": 0, "grpo.reward_shaping.overlong_buffer_length": 64},
    {"grpo.reward_shaping.stop_properly_penalty_coef": 0, "grpo.reward_shaping.overlong_buffer_penalty": 2},
    {"grpo.reward_shaping.stop_properly_penalty_coef": 0, "grpo.reward_shaping.max_response_length": 64},
    {"grpo.low_effort.string": "brief"},
    {"grpo.low_effort.weight": 0.2},
    {"signals.stop_on": ["policy_colapse", "truncation_high"]},
    {"signals.stop_on": ["out_of_memory"]},
    {"grpo.advantage_clip_low": 5, "grpo.advantage_clip_high": -5},
    {"grpo.epsilon_filtering.enabled": True, "grpo.reward_scaling.enabled": True, "grpo.reward_scaling.target_min": -1},
    {"grpo.num_generations_per_prompt": 1},
    {"grpo.num_generations_per_prompt": 1, **PLUS_PLUS},
    {"grpo.adv_estimator.name": "gdpo"},
    {"grpo.adv_estimator.name": "gdpo", "grpo.adv_estimator.components": ["right"]},
    {"grpo.adv_estimator.components": ["right", "format"]},
    {"grpo.low_effort.string": "brief", "grpo.low_effort.weight": 0.2, **GDPO},
    {"grpo.reward_shaping.enabled": True, **GDPO},
    {**GDPO, "grpo.adv_estimator.reward_weights": [1, 1]},
    {"grpo.adv_estimator.name": "gdpo", "grpo.adv_estimator.components": ["a", "b"],
     "grpo.adv_estimator.reward_weights": [1]},
    {"grpo.batch_multiplier": 1.5},
    {"grpo.batch_multiplier": 1.5, "grpo.use_dynamic_sampling": True, "grpo.async_grpo.enabled": True},
    {"grpo.val_start_at": 10},
    {"grpo.adv_estimator.minus_baseline": False},
    {"grpo.normalize_rewards": False, **PLUS_PLUS},
    {"grpo.use_leave_one_out_baseline": False, **PLUS_PLUS},
]  # fmt: skip
JUDGE = "env.nemo_gym.genrm_model.responses_api_models.vllm_model"
ENV: list[dict[str, Any]] = [
    {f"{JUDGE}.backend": "http"},
    {f"{JUDGE}.tensor_parallel_size": 2},
    {"env.should_use_nemo_gym": False},
]
RUN: list[dict[str, Any]] = [
    {"policy.train_global_batch_size": 128, **ON_POLICY},
    {"policy.train_global_batch_size": 100},
    {"grpo.async_grpo.enabled": True, **ON_POLICY},
    {"reward_penalties.penalize_empty_final_answer": True, **GDPO},
    {"reward_penalties.penalize_unwanted_tokens": True},
    {"reward_penalties.token_ids.unwanted": [2]},
    {"reward_penalties.token_ids.think_open": 12},
    {"policy.generation.top_p": 0.9, "loss_fn.reference_policy_kl_penalty": 0.1},
    {"policy.generation.top_k": 20, "loss_fn.reference_policy_kl_penalty": 0.1},
    {"checkpointing.checkpoint_must_save_by": "0:99:99:99"},
    {"policy.generation.temperature": 0},
    {"policy.generation.max_new_tokens": 8193, "policy.max_total_sequence_length_end": 8192},
    {"policy.sequence_packing.train_mb_tokens": 4000, "policy.sequence_packing.enabled": True},
    {"policy.sequence_packing.logprob_mb_tokens": 4096, "policy.sequence_packing.enabled": True,
     "policy.max_total_sequence_length_end": 8192},
    {"policy.dynamic_batching.train_mb_tokens": 4096, "policy.dynamic_batching.enabled": True, **DTENSOR,
     "policy.max_total_sequence_length": 4090, "policy.dynamic_batching.sequence_length_round": 100},
]  # fmt: skip
LINEAR = {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.1, "total_iters": 10}}
POLICY: list[dict[str, Any]] = [
    {"policy.megatron_cfg.optimizer.weight_decay": 10_000},
    {"policy.megatron_cfg.mtp_num_layers": 1, "policy.megatron_cfg.mtp_loss_scaling_factor": 0.0},
    {"policy.megatron_cfg.mtp_num_layers": 1, **DTENSOR},
    {"policy.megatron_cfg.scheduler.lr_decay_style": "cosine", "policy.megatron_cfg.scheduler.lr_decay_iters": 5,
     "policy.megatron_cfg.scheduler.lr_warmup_iters": 5},
    {"policy.megatron_cfg.scheduler.lr_decay_iters": 5},
    {"policy.megatron_cfg.scheduler.lr_warmup_init": 3e-7},
    {"policy.optimizer": {"kwargs": {"lr": 1e-5}}},
    {"policy.scheduler": [LINEAR]},
    {"policy.router_replay.enabled": True, **DTENSOR},
    {"policy.router_replay.enabled": True, "policy.generation.vllm_cfg.expose_http_server": True},
    {"policy.scheduler": [LINEAR, LINEAR], **DTENSOR},
    {"policy.scheduler": [LINEAR, {"milestones": [5]}, LINEAR], **DTENSOR},
    {"policy.scheduler": [LINEAR, LINEAR, LINEAR, {"milestones": [6, 5]}], **DTENSOR},
    {"policy.scheduler": [LINEAR, LINEAR, {"milestones": [5, 6]}], **DTENSOR},
    {"policy.scheduler": [{"milestones": [5]}], **DTENSOR},
    {"policy.scheduler": [], **DTENSOR},
    {"policy.megatron_cfg.optimizer.lr": 1e-5, **DTENSOR},
    {"policy.megatron_cfg.optimizer.adam_beta1": 0.8, **DTENSOR},
    {"policy.megatron_cfg.scheduler.lr_warmup_iters": 5, **DTENSOR},
    {"policy.megatron_cfg.optimizer.exp_avg_dtype": "bfloat16"},
    {"policy.megatron_cfg.optimizer.exp_avg_sq_dtype": "bfloat16",
     "policy.megatron_cfg.optimizer.use_precision_aware_optimizer": True},
    {"policy.generation.vllm_cfg.expert_parallel_size": 2},
    *(
        {f"policy.megatron_cfg.{key}": value, **DTENSOR}
        for key, value in {
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
            "context_parallel_size": 2,
            "expert_model_parallel_size": 2,
            "sequence_parallel": True,
            "activation_checkpointing": True,
            "freeze_moe_router": True,
            "moe_router_bias_update_rate": 0.001,
            "optimizer.use_precision_aware_optimizer": True,
            "optimizer.use_distributed_optimizer": True,
        }.items()
    ),
    {"policy.dtensor_cfg.tensor_parallel_size": 2},
    {"policy.dtensor_cfg.activation_checkpointing": True},
    {"policy.dtensor_cfg.cpu_offload": True},
    {"policy.megatron_cfg.enabled": False},
    {"policy.sequence_packing.enabled": True, **DTENSOR},
    {"policy.sequence_packing.enabled": True, "policy.dynamic_batching.enabled": True},
]  # fmt: skip


def composed(values: dict[str, Any]) -> ComposedConfig:
    """Dotted keys, as if each had been given as an override."""
    nested: dict[str, Any] = {}
    for dotted, value in values.items():
        *sections, key = dotted.split(".")
        node = nested
        for section in sections:
            node = node.setdefault(section, {})
        node[key] = value
    origins = {tuple(key.split(".")): f"override '{key}'" for key in values}
    return ComposedConfig("rl/toy", nested, {}, origins)


def refusal(values: dict[str, Any]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        validate(composed(values), RlConfig)
    return caught.value


def name(values: dict[str, Any]) -> str:
    return ",".join(f"{key.split('.', 1)[1]}={value}" for key, value in values.items())


MEGATRON, LORA = "policy.megatron_cfg", "policy.dtensor_cfg.lora_cfg"
PEFT = f"{MEGATRON}.peft"
ON = {f"{PEFT}.enabled": True}
OF_DTENSOR = {**DTENSOR, f"{LORA}.enabled": True}
ADAPTERS: list[tuple[Any, dict[str, Any], str]] = [
    *((SftConfig, {f"{PEFT}.{key}": value}, f"{PEFT}.{key}") for key, value in {
        "target_modules": ["linear_qkv"], "exclude_modules": ["linear_qkv"], "dim": 8, "alpha": 8.0, "dropout": 0.1,
        "lora_A_init_method": "xavier"}.items()),
    *((SftConfig, {**DTENSOR, f"{LORA}.{key}": value}, f"{LORA}.{key}") for key, value in {
        "match_all_linear": False, "exclude_modules": ["q_proj"], "dim": 16, "alpha": 8.0,
        "lora_A_init": "xavier"}.items()),
    (SftConfig, {**ON, f"{PEFT}.target_modules": ["linear_qkv"], f"{PEFT}.exclude_modules": ["linear_proj"]},
     f"{PEFT}.exclude_modules"),
    (SftConfig, {**ON, f"{PEFT}.dropout_position": "post"}, f"{PEFT}.dropout_position"),
    (SftConfig, {**ON, f"{MEGATRON}.mtp_num_layers": 1}, f"{MEGATRON}.mtp_num_layers"),
    (SftConfig, {**ON, f"{MEGATRON}.moe_router_bias_update_rate": 1e-3}, f"{MEGATRON}.moe_router_bias_update_rate"),
    (SftConfig, {**OF_DTENSOR, f"{LORA}.target_modules": ["q_proj"]}, f"{LORA}.target_modules"),
    (SftConfig, {**OF_DTENSOR, f"{LORA}.match_all_linear": False}, f"{LORA}.match_all_linear"),
    (SftConfig, {**OF_DTENSOR, "policy.dtensor_cfg.tensor_parallel_size": 2},
     "policy.dtensor_cfg.tensor_parallel_size"),
    (SftConfig, {**OF_DTENSOR, f"{LORA}.dropout": 0.1, "policy.dtensor_cfg.activation_checkpointing": True},
     f"{LORA}.dropout"),
    (SftConfig, {**DTENSOR, **ON}, f"{PEFT}.enabled"),
    (SftConfig, {f"{LORA}.enabled": True}, f"{LORA}.enabled"),
    (RlConfig, {**ON, f"{PEFT}.dropout": 0.1}, f"{PEFT}.dropout"),
    (RlConfig, {**OF_DTENSOR, f"{LORA}.dropout": 0.1}, f"{LORA}.dropout"),
]  # fmt: skip
DISTILLATION: list[dict[str, Any]] = [
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


def mended(broken: dict[str, Any], hint: str) -> dict[str, Any]:
    """Values after the overrides of a hint."""
    values = dict(broken)
    for part in hint.split(" "):
        key, _, value = part.partition("=")
        if key.startswith("~"):
            values.pop(key[1:])
        else:
            values[key] = yaml.safe_load(value)
    return values


@pytest.mark.parametrize(
    ("schema", "broken", "key"),
    [
        *((RlConfig, broken, None) for broken in (*LOSS, *GRPO, *ENV, *RUN, *POLICY)),
        *((OpdConfig, broken, None) for broken in DISTILLATION),
        *ADAPTERS,
    ],
    ids=str,
)
def test_a_key_that_needs_another_is_refused_and_its_hint_helps(schema: Any, broken: Any, key: str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(composed(broken), schema)
    error = caught.value
    assert not error.problems and len(error.hints) == 1
    assert error.where in {f"override '{each}'" for each in ([key] if key else broken)}
    try:
        validate(composed(mended(broken, error.hints[0])), schema)
    except ConfigError as another:
        assert error.what not in str(another)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("01:30", 5400), ("48:00", 172800), ("00:00:07", 7), ("00:03:30:00", 12600), ("2:00:00:01", 172801)],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds
    assert validate(composed({"checkpointing.checkpoint_must_save_by": text}), RlConfig)


@pytest.mark.parametrize("text", ["90", "01:60", "00:24:00:00", "00:00:60", "1:2:3:4:5", "-1:00", "a:b", ""])
def test_what_is_no_duration_is_refused(text: str) -> None:
    assert "must be a duration" in refusal({"checkpointing.checkpoint_must_save_by": text}).what


@pytest.mark.parametrize(
    ("schema", "broken"),
    [
        (DpoConfig, {"dpo.preference_loss_weight": 0}),
        (RlPrepConfig, {}),
        (RlPrepConfig, {"reasoning_gym.tasks": TASKS}),
        (RlPrepConfig, {"reasoning_gym.tasks": TASKS, "rows.train": 9, "jsonl.path": "x"}),
        (RlPrepConfig, {"reasoning_gym.tasks": TASKS, "rows.train": 9, "sample": 9}),
        (RlPrepConfig, {"reasoning_gym.tasks": TASKS, "rows.train": 9, "reasoning_gym.heldout_fraction": 0.9}),
        (RlPrepConfig, {"jsonl.path": "x", "input_path": "y"}),
        (RlPrepConfig, {"input_path": "x", "blend_path": "y"}),
        (
            RlPrepConfig,
            {"reasoning_gym.tasks": TASKS, "rows.train": 9, "prompt_length": {"tokenizer": "x", "max_tokens": 9}},
        ),
        (SftPrepConfig, {"input_path": "x", "kind": "comparisons", "reasoning.strip_share": 0.1}),
        (SftPrepConfig, {"input_path": "x", "reasoning.strip_share": 0.9, "reasoning.truncate_share": 0.2}),
        (PreferencePrepConfig, {"reasoning_gym.tasks": TASKS, "rows.train": 9}),
        (ToolPreferencePrepConfig, {"tool_tasks.offered": 3}),
        (SweTasksConfig, {}),
        (SweTasksConfig, {"packages.path": "x", "sample": 9}),
        (SweTasksConfig, {"jsonl.path": "x", "kind": "steps"}),
        (SftConfig, {"from_scratch.architecture": "nemotron_h"}),
        (SftConfig, {"from_scratch.hybrid.pattern": "M*"}),
        (SftConfig, {**HYBRID, "from_scratch.num_hidden_layers": 5}),
        (SftConfig, {**HYBRID, "from_scratch.rope_theta": 5.0}),
        (SftConfig, {**HYBRID, "from_scratch.tie_word_embeddings": False}),
        (SftConfig, {**HYBRID, "from_scratch.hybrid.n_groups": 3}),
        (SftConfig, {**HYBRID, "from_scratch.hybrid.num_experts_per_tok": 9}),
        (SftConfig, {"from_scratch.num_attention_heads": 4, "from_scratch.num_key_value_heads": 3}),
    ],
    ids=str,
)
def test_other_steps_refuse_with_a_hint_as_well(schema: Any, broken: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(composed(broken), schema)
    (hint,) = caught.value.hints
    pasted = {part.partition("=")[0] for part in hint.split(" ")}
    validate(composed(mended({key: broken[key] for key in broken if key.split(".")[0] not in pasted}, hint)), schema)


def test_a_token_may_choose_every_expert_there_is() -> None:
    chosen = validate(composed({**HYBRID, "from_scratch.hybrid.num_experts_per_tok": 8}), SftConfig).from_scratch
    assert chosen is not None and chosen.hybrid is not None
    assert chosen.hybrid.num_experts_per_tok == chosen.hybrid.n_routed_experts == 8


@pytest.mark.parametrize("changed", ["tensor_model_parallel_size", "activation_checkpointing"])
def test_only_the_dropout_of_adapters_rules_out_what_it_would_differ_over(changed: str) -> None:
    peft = "policy.megatron_cfg.peft"
    values = {"policy.checkpoint": "m", f"{peft}.enabled": True, f"policy.megatron_cfg.{changed}": 2}
    values |= {f"policy.megatron_cfg.{changed}": True} if changed.endswith("ing") else {}
    assert validate(composed({**values, f"{peft}.dropout": 0.0}), RlConfig)
    error = refusal({**values, f"{peft}.dropout": 0.1})
    assert "dropout would differ" in error.what and error.hints[0].endswith("dropout=0")


def test_a_sample_of_made_up_rows_is_meant_as_their_number() -> None:
    with pytest.raises(ConfigError) as caught:
        validate(composed({"reasoning_gym.tasks": TASKS, "rows.train": 9, "sample": 5}), RlPrepConfig)
    assert caught.value.hints == ("sample=null rows.train=5",)


@pytest.mark.parametrize(
    ("kind", "bounds"), [("tis", (None, 5)), ("icepop", (0.5, 5)), ("seq-mask-tis", (0.999, 1.002))]
)
def test_the_hints_of_a_truncation_without_bounds_lead_to_the_usual_ones(
    kind: str, bounds: tuple[float | None, float]
) -> None:
    values: dict[str, Any] = {**CORRECTED, "loss_fn.truncated_importance_sampling_type": kind}
    error = refusal(values)
    for problem in error.problems or [error]:
        key, value = problem.hints[0].split("=")
        values[key] = float(value)
    accepted = validate(composed(values), RlConfig).loss_fn
    assert (
        accepted.truncated_importance_sampling_ratio_min,
        accepted.truncated_importance_sampling_ratio,
    ) == bounds


def test_every_broken_rule_is_told_at_once_each_with_what_set_it() -> None:
    error = refusal({"loss_fn.use_kl_in_reward": True, "loss_fn.disable_ppo_ratio": True, **ON_POLICY, **PLUS_PLUS,
                     "grpo.normalize_rewards": False})  # fmt: skip
    assert {problem.where for problem in error.problems} == {
        "override 'loss_fn.use_kl_in_reward'",
        "override 'loss_fn.disable_ppo_ratio'",
        "override 'grpo.normalize_rewards'",
    }
    assert "hint: loss_fn.disable_ppo_ratio=false" in str(error)


@pytest.mark.parametrize("key", ["kl_input_clamp_value", "kl_output_clamp_value"])
def test_a_clamp_of_the_kl_is_above_zero_or_none(key: str) -> None:
    assert getattr(validate(composed({f"loss_fn.{key}": None}), RlConfig).loss_fn, key) is None
    for value in (0, -1):
        assert refusal({f"loss_fn.{key}": value}).where == f"override 'loss_fn.{key}'"


@pytest.mark.parametrize(
    "meaningful",
    [
        {"grpo.num_generations_per_prompt": 1, "grpo.adv_estimator.minus_baseline": False, **PLUS_PLUS},
        {"grpo.advantage_clip_low": -5, "grpo.advantage_clip_high": 5},
        {"grpo.async_grpo.enabled": True, **ON_POLICY, **TIS},
        {"grpo.reward_shaping.stop_properly_penalty_coef": 0, "grpo.reward_shaping.overlong_buffer_length": 128},
        {"policy.dynamic_batching.enabled": True, **DTENSOR},
        {"policy.generation.temperature": 0.7},
        {"grpo.batch_multiplier": 1.5, "grpo.use_dynamic_sampling": True},
        {"grpo.val_start_at": 10, "grpo.val_period": 5},
        {"policy.generation.top_p": 0.9, "policy.generation.top_k": 20},
    ],
    ids=name,
)
def test_what_has_a_meaning_is_accepted(meaningful: dict[str, Any]) -> None:
    validate(composed(meaningful), RlConfig)


LEARNING_RATE = "policy.megatron_cfg.optimizer.lr"


@pytest.mark.parametrize(
    ("second", "first", "value"),
    [
        ("grpo.num_iterations", "grpo.max_num_steps", 200),
        ("grpo.learning_rate", LEARNING_RATE, 5e-7),
        ("grpo.adv_estimator.normalize_rewards", "grpo.normalize_rewards", False),
        ("grpo.adv_estimator.use_leave_one_out_baseline", "grpo.use_leave_one_out_baseline", False),
    ],
)
def test_a_second_name_says_what_the_first_does_and_goes_before_it(second: str, first: str, value: Any) -> None:
    given = value if isinstance(value, bool) else str(value)  # YAML reads 5e-7 as a text
    plain = validate(composed({first: value}), RlConfig)
    assert validate(composed({second: given}), RlConfig) == plain
    assert validate(composed({second: given, first: 3 if value is not False else True}), RlConfig) == plain
    again = composed({first: 7 if value is not False else True}).values
    filled_in = plain.model_dump(mode="json")
    assert RlConfig.model_validate(_merged(filled_in, again)) == validate(
        composed({first: 7 if value is not False else True}), RlConfig
    )  # a run's written config, overridden, goes by the override


def test_the_learning_rate_is_that_of_the_policy_that_trains() -> None:
    config = validate(composed({"grpo.learning_rate": 5e-7, **DTENSOR}), RlConfig)
    assert config.policy.optimizer is not None and config.policy.optimizer.kwargs.lr == 5e-7
    assert config.policy.megatron_cfg == RlConfig().policy.megatron_cfg


def _merged(values: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    return {k: _merged(v, over.get(k, {})) if isinstance(v, dict) else over.get(k, v) for k, v in values.items()}


@pytest.mark.parametrize(
    ("key", "value"),
    [("grpo.num_iterations", 0), ("grpo.learning_rate", "fast"), ("grpo.adv_estimator.normalize_rewards", 2)],
)
def test_a_wrong_value_is_told_of_the_name_that_it_was_given_under(key: str, value: Any) -> None:
    assert refusal({key: value}).where == f"override '{key}'"


@pytest.mark.parametrize("schema", [SftConfig, DpoConfig])
@pytest.mark.parametrize("key", ["policy.generation.max_new_tokens", "policy.max_total_sequence_length_end"])
def test_a_step_that_samples_nothing_knows_no_key_of_sampling(schema: Any, key: str) -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'policy\.(generation|max_total_sequence_length_end)"):
        validate(composed({key: 64}), schema)


def test_a_config_that_was_filled_in_is_as_valid_as_before() -> None:
    """Runs are given configs with every default written out: a rule must not mistake that for a choice."""
    sparse = validate(composed({**PLUS_PLUS, "policy.dtensor_cfg.enabled": True}), RlConfig)
    assert RlConfig.model_validate(sparse.model_dump(mode="json")) == sparse


def test_rules_hold_for_sections_built_in_code() -> None:
    with pytest.raises(ValueError, match="needs token_level_loss=false"):
        LossFnConfig(sequence_level_importance_ratios=True)


def test_one_answer_a_prompt_is_enough_and_a_kl_has_three_kinds() -> None:
    one = {"grpo.num_generations_per_prompt": 1}
    assert validate(composed(one), OpdConfig)
    with pytest.raises(ConfigError):
        validate(composed(one), RlConfig)
    with pytest.raises(ConfigError, match="needs teachers"):
        validate(composed({"grpo.adv_estimator.name": "opd"}), RlConfig)
    gradient = {"loss_fn.disable_ppo_ratio": True, "grpo.advantage_clip_low": -5, "grpo.advantage_clip_high": 5}
    assert validate(composed({**one, **gradient, "grpo.adv_estimator.name": "opd"}), OpdConfig)
    with pytest.raises(ConfigError, match="forward"):
        validate(composed({"loss_fn.kl_type": "backward"}), OpdConfig)
