"""Settings without a meaning together, or that would be ignored: refused with the config, with what mends it; and the
neighbours of these, which are let through.

Which key needs which other stands in key_tables.tsv; here is one of each way to say so, and every rule
over several keys.
"""

from typing import Any

import pytest
import yaml

from nemotron_steps.config.compose import ComposedConfig
from nemotron_steps.config.schema.data_prep import RlPrepConfig, SftPrepConfig
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
TRUNCATED = "loss_fn.truncated_importance_sampling"
TIS = {**CORRECTED, f"{TRUNCATED}_type": "tis", f"{TRUNCATED}_ratio": 5}
SEQUENCES = {"loss_fn.sequence_level_importance_ratios": True, "loss_fn.token_level_loss": False}
DTENSOR = {"policy.dtensor_cfg.enabled": True}
MEGATRON, LORA = "policy.megatron_cfg", "policy.dtensor_cfg.lora_cfg"
PEFT, OPTIMIZER, SCHEDULER = f"{MEGATRON}.peft", f"{MEGATRON}.optimizer", f"{MEGATRON}.scheduler"
TASKS = {"reasoning_gym.tasks": [{"dataset": "basic_arithmetic"}]}
GDPO = {"grpo.adv_estimator.name": "gdpo", "grpo.adv_estimator.components": ["right", "format"]}
HYBRID = {"from_scratch.architecture": "nemotron_h", "from_scratch.hybrid.pattern": "ME*"}
PLUS_PLUS = {"grpo.adv_estimator.name": "reinforce_plus_plus"}
SHAPING, SCALING = "grpo.reward_shaping", "grpo.reward_scaling"
JUDGE = "env.nemo_gym.genrm_model.responses_api_models.vllm_model"
PACKS = {"policy.sequence_packing.enabled": True}
LINEAR = {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.1, "total_iters": 10}}
APART = "on_policy_distillation.non_colocated_teachers"

REFUSED: dict[Any, list[dict[str, Any]]] = {
    RlConfig: [
        {"loss_fn.sequence_level_importance_ratios": True},
        {"loss_fn.disable_ppo_ratio": True, **ON_POLICY},
        {**CORRECTED, f"{TRUNCATED}_type": "tis"},
        {**TIS, f"{TRUNCATED}_ratio_min": 9.0},
        {**TIS, f"{TRUNCATED}_type": "seq-mask-tis", f"{TRUNCATED}_ratio_min": 0.9, **SEQUENCES},
        {"loss_fn.use_kl_in_reward": True},
        {f"{SCALING}.enabled": True, f"{SCALING}.source_min": 1, f"{SCALING}.source_max": 1},
        {f"{SHAPING}.stop_properly_penalty_coef": 0, f"{SHAPING}.overlong_buffer_length": 64},
        {"grpo.low_effort.string": "brief"},
        {"signals.stop_on": ["policy_colapse", "truncation_high"]},
        {"grpo.advantage_clip_low": 5, "grpo.advantage_clip_high": -5},
        {"grpo.epsilon_filtering.enabled": True, f"{SCALING}.enabled": True, f"{SCALING}.target_min": -1},
        {"grpo.num_generations_per_prompt": 1},
        {"grpo.adv_estimator.name": "gdpo"},
        {**GDPO, "grpo.adv_estimator.components": ["right"]},
        {f"{SHAPING}.enabled": True, **GDPO},
        {**GDPO, "grpo.adv_estimator.components": ["a", "b"], "grpo.adv_estimator.reward_weights": [1]},
        {**GDPO, "grpo.adv_estimator.reward_weights": [1, 1]},
        {"grpo.val_start_at": 10},
        {"grpo.adv_estimator.name": "opd"},
        {f"{JUDGE}.backend": "http"},
        {"env.should_use_nemo_gym": False},
        {"policy.train_global_batch_size": 128, **ON_POLICY},
        {"grpo.async_grpo.enabled": True, **ON_POLICY},
        {"policy.generation.top_p": 0.9, "loss_fn.reference_policy_kl_penalty": 0.1},
        {"policy.generation.temperature": 0},
        {"policy.generation.max_new_tokens": 8193, "policy.max_total_sequence_length_end": 8192},
        {"policy.sequence_packing.train_mb_tokens": 4000, **PACKS},
        {"policy.dynamic_batching.train_mb_tokens": 4096, "policy.dynamic_batching.enabled": True, **DTENSOR,
         "policy.max_total_sequence_length": 4090, "policy.dynamic_batching.sequence_length_round": 100},
    ],
    SftConfig: [
        {f"{OPTIMIZER}.weight_decay": 10_000},
        {f"{SCHEDULER}.lr_decay_style": "cosine", f"{SCHEDULER}.lr_decay_iters": 5, f"{SCHEDULER}.lr_warmup_iters": 5},
        {f"{OPTIMIZER}.exp_avg_sq_dtype": "bfloat16", f"{OPTIMIZER}.use_precision_aware_optimizer": True},
        {"policy.scheduler": [LINEAR, LINEAR], **DTENSOR},
        {"policy.scheduler": [LINEAR, LINEAR, LINEAR, {"milestones": [6, 5]}], **DTENSOR},
        {"policy.scheduler": [], **DTENSOR},
        {"policy.scheduler": [LINEAR]},
        {f"{PEFT}.dim": 8},
        {**DTENSOR, f"{LORA}.enabled": True, f"{LORA}.dropout": 0.1,
         "policy.dtensor_cfg.activation_checkpointing": True},
        {f"{PEFT}.enabled": True, f"{PEFT}.dropout": 0.1, f"{MEGATRON}.tensor_model_parallel_size": 2},
        {**HYBRID, "from_scratch.num_hidden_layers": 5},
        {**HYBRID, "from_scratch.hybrid.n_groups": 3},
        {"from_scratch.num_attention_heads": 4, "from_scratch.num_key_value_heads": 3},
    ],
    OpdConfig: [
        {"grpo.reward_shaping.enabled": True},
        {"loss_fn.ratio_clip_max": 0.5},
        {"loss_fn.zero_outside_topk": True, "on_policy_distillation.topk_logits_k": None},
        {f"{APART}.default_teacher_cfg.num_nodes": 2},
        {f"{APART}.enabled": True, "on_policy_distillation.offload": False},
        {"grpo.adv_estimator.name": "opd", "loss_fn.kl_type": "forward"},
        {**DTENSOR},
        {"policy.generation.temperature": 0.7},
    ],
    DpoConfig: [{"dpo.preference_loss_weight": 0}],
}  # fmt: skip
SOURCES: list[tuple[Any, dict[str, Any]]] = [
    (RlPrepConfig, {}),
    (RlPrepConfig, {**TASKS, "rows.train": 9, "jsonl.path": "x"}),
    (RlPrepConfig, {**TASKS, "rows.train": 9, "reasoning_gym.heldout_fraction": 0.9}),
    (RlPrepConfig, {"jsonl.path": "x", "input_path": "y"}),
    (RlPrepConfig, {**TASKS, "rows.train": 9, "prompt_length": {"tokenizer": "x", "max_tokens": 9}}),
    (SftPrepConfig, {"input_path": "x", "kind": "comparisons", "reasoning.strip_share": 0.1}),
    (SftPrepConfig, {"input_path": "x", "reasoning.strip_share": 0.9, "reasoning.truncate_share": 0.2}),
    (SftConfig, {"from_scratch.architecture": "nemotron_h"}),
    (ToolPreferencePrepConfig, {"tool_tasks.offered": 3}),
    (SweTasksConfig, {"jsonl.path": "x", "kind": "steps"}),
]
ACCEPTED: dict[Any, list[dict[str, Any]]] = {
    RlConfig: [
        {"grpo.low_effort.string": "brief", "grpo.low_effort.weight": 0.2},
        {"grpo.advantage_clip_low": 5, "grpo.advantage_clip_high": 5},
        {"policy.generation.max_new_tokens": 8192, "policy.max_total_sequence_length_end": 8192},
        {"grpo.num_generations_per_prompt": 1, "grpo.adv_estimator.minus_baseline": False, **PLUS_PLUS},
        {**GDPO, "grpo.adv_estimator.components": ["a", "b"], "grpo.adv_estimator.reward_weights": [1, 0.5]},
        {**TIS, f"{TRUNCATED}_ratio_min": 5, "grpo.async_grpo.enabled": True, **ON_POLICY},
        {**TIS, f"{TRUNCATED}_type": "icepop", f"{TRUNCATED}_ratio_min": 0, **SEQUENCES},
        {f"{JUDGE}.backend": "http", f"{JUDGE}.base_url": ["http://one/v1", "http://two/v1"]},
        {"policy.train_global_batch_size": 256, **ON_POLICY},
        {"policy.sequence_packing.train_mb_tokens": 4096, "policy.sequence_packing.sequence_length_round": 9, **PACKS},
        {"policy.sequence_packing.train_mb_tokens": 1, "policy.dynamic_batching.logprob_mb_tokens": 1},
        {f"{SCHEDULER}.lr_decay_style": "cosine", f"{SCHEDULER}.lr_decay_iters": 6, f"{SCHEDULER}.lr_warmup_iters": 5},
        {f"{OPTIMIZER}.exp_avg_sq_dtype": "bfloat16", f"{OPTIMIZER}.use_precision_aware_optimizer": True,
         f"{OPTIMIZER}.adam_beta2": 1 - 2**-8},
        {**DTENSOR, f"{MEGATRON}.enabled": False, "policy.dynamic_batching.enabled": True},
    ],
    SftConfig: [
        {f"{PEFT}.enabled": True, f"{PEFT}.dropout": 0.1, f"{PEFT}.dropout_position": "post"},
        {**HYBRID, "from_scratch.hybrid.n_groups": 8, "from_scratch.hybrid.num_experts_per_tok": 8},
    ],
    DpoConfig: [{"dpo.preference_loss_weight": 0, "dpo.sft_loss_weight": 0.1}],
    OpdConfig: [
        {"grpo.num_generations_per_prompt": 1, "loss_fn.mixed_kl_weight": 0.2},
        {f"{APART}.enabled": True, f"{APART}.teacher_overrides": {"a": {"num_nodes": 3}}},
        {"grpo.adv_estimator.name": "opd", "loss_fn.disable_ppo_ratio": True, "grpo.advantage_clip_low": -5},
    ],
    RlPrepConfig: [
        {**TASKS, "rows.train": 9, "reasoning_gym.heldout_fraction": 0.89},
    ],
    SftPrepConfig: [
        {"input_path": "x", "reasoning.strip_share": 0.5, "reasoning.truncate_share": 0.5},
        {"swe.share": 0.5, "rows.train": 9, **TASKS},
    ],
    SweTasksConfig: [{"made_up": {}, "rows.train": 9, "kind": "steps"}, {"jsonl.path": "x", "sample": 9}],
}  # fmt: skip


def pairs(table: dict[Any, list[dict[str, Any]]]) -> list[tuple[Any, dict[str, Any]]]:
    return [(schema, values) for schema, several in table.items() for values in several]


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


def of(values: dict[str, Any], schema: Any = RlConfig) -> Any:
    return validate(composed(values), schema)


def refusal(values: dict[str, Any], schema: Any = RlConfig) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        of(values, schema)
    return caught.value


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


@pytest.mark.parametrize(("schema", "broken"), pairs(REFUSED), ids=str)
def test_what_has_no_meaning_is_refused_and_its_hint_helps(schema: Any, broken: dict[str, Any]) -> None:
    error = refusal(broken, schema)
    assert not error.problems and len(error.hints) == 1
    assert error.where in {f"override '{each}'" for each in broken}
    try:
        of(mended(broken, error.hints[0]), schema)
    except ConfigError as another:
        assert error.what not in str(another)


@pytest.mark.parametrize(("schema", "broken"), SOURCES, ids=str)
def test_sources_that_do_not_go_together_are_mended_by_the_hint(schema: Any, broken: dict[str, Any]) -> None:
    (hint,) = refusal(broken, schema).hints
    pasted = {part.partition("=")[0] for part in hint.split(" ")}
    of(mended({key: broken[key] for key in broken if key.split(".")[0] not in pasted}, hint), schema)


@pytest.mark.parametrize(("schema", "values"), pairs(ACCEPTED), ids=str)
def test_what_has_a_meaning_is_accepted(schema: Any, values: dict[str, Any]) -> None:
    of(values, schema)


@pytest.mark.parametrize(
    ("values", "batch"),
    [
        ({}, 256),
        ({"grpo.num_prompts_per_step": 4}, 32),
        ({"policy.train_global_batch_size": None, "grpo.num_prompts_per_step": 2}, 16),
        ({"policy.train_global_batch_size": 64}, 64),
    ],
)
def test_rollouts_of_a_step_make_one_update_unless_a_batch_is_given(values: dict[str, Any], batch: int) -> None:
    assert of(values).policy.train_global_batch_size == batch


def test_a_duration_has_two_to_four_parts() -> None:
    assert [parse_duration(text) for text in ("01:30", "00:00:07", "2:00:00:01")] == [5400, 7, 172801]


@pytest.mark.parametrize("text", ["90", "01:60", "00:24:00:00", "1:2:3:4:5", "-1:00"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    assert "must be a duration" in refusal({"checkpointing.checkpoint_must_save_by": text}).what


@pytest.mark.parametrize(
    ("second", "first", "value"),
    [
        ("grpo.num_iterations", "grpo.max_num_steps", 200),
        ("grpo.learning_rate", f"{OPTIMIZER}.lr", 5e-7),
        ("grpo.adv_estimator.normalize_rewards", "grpo.normalize_rewards", False),
        ("grpo.adv_estimator.use_leave_one_out_baseline", "grpo.use_leave_one_out_baseline", False),
    ],
)
def test_a_second_name_says_what_the_first_does_and_goes_before_it(second: str, first: str, value: Any) -> None:
    given = value if isinstance(value, bool) else str(value)  # YAML reads 5e-7 as a text
    other = 3 if value is not False else True
    plain = of({first: value})
    assert of({second: given}) == of({second: given, first: other}) == plain
    # A run's written config, overridden, goes by the override.
    assert RlConfig.model_validate(_merged(plain.model_dump(mode="json"), composed({first: other}).values)) == of(
        {first: other}
    )
    assert refusal({second: "?"}).where == f"override '{second}'"


def _merged(values: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    return {k: _merged(v, over.get(k, {})) if isinstance(v, dict) else over.get(k, v) for k, v in values.items()}


def test_a_config_that_was_filled_in_is_as_valid_as_before() -> None:
    """Runs are given configs with every default written out: a rule must not mistake that for a choice."""
    sparse = of({**PLUS_PLUS, "policy.dtensor_cfg.enabled": True})
    assert RlConfig.model_validate(sparse.model_dump(mode="json")) == sparse
    with pytest.raises(ValueError, match="needs token_level_loss=false"):  # and sections that are built in code
        LossFnConfig(sequence_level_importance_ratios=True)
