"""The public recipes' stages: each config has the recipe's values, is planned without a problem, and fits its GPUs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemotron_steps.cli.request import Asked, Workbench
from nemotron_steps.config.schema.rl import JUDGE_ROLES, RlConfig
from nemotron_steps.engine.placement.on_ray import DevicePlan
from nemotron_steps.engine.rollouts.low_effort import asks_for_low_effort
from nemotron_steps.manifest.packs import builtin_pack_root

CONFIGS = sorted(
    (file.parent.name, file.stem)
    for step in ("rlvr", "swe", "rlhf")
    for file in Path(builtin_pack_root(), "configs", "rl", "nemo_rl", step).glob("*.yaml")
    if file.stem != "tiny"
)
GENRM = "nvidia/Qwen3-Nemotron-235B-A22B-GenRM-2603"
GENRM_MODEL = "env.nemo_gym.genrm_model.responses_api_models.vllm_model.model"
COMPARE = "env.nemo_gym.environments.genrm_compare"
MEGATRON = "policy.megatron_cfg"

SUPER3 = {
    "grpo.normalize_rewards": True,
    "grpo.use_leave_one_out_baseline": True,
    "grpo.seed": 42,
    "grpo.seq_logprob_error_threshold": 2,
    "grpo.async_grpo.enabled": True,
    "grpo.async_grpo.max_trajectory_age_steps": 1,
    "grpo.async_grpo.in_flight_weight_updates": True,
    "grpo.async_grpo.recompute_kv_cache_after_weight_updates": False,
    "loss_fn.ratio_clip_min": 0.2,
    "loss_fn.ratio_clip_max": 0.28,
    "loss_fn.reference_policy_kl_type": "k3",
    "loss_fn.truncated_importance_sampling_type": "tis",
    "loss_fn.truncated_importance_sampling_ratio": 5,
    "loss_fn.token_level_loss": True,
    "loss_fn.force_on_policy_ratio": True,
    "policy.sequence_packing.enabled": True,
    "policy.sequence_packing.sequence_length_round": 64,
    f"{MEGATRON}.activation_checkpointing": True,
    f"{MEGATRON}.freeze_moe_router": True,
    f"{MEGATRON}.moe_router_bias_update_rate": 1e-3,
    f"{MEGATRON}.scheduler.lr_warmup_iters": 10,
    f"{MEGATRON}.optimizer.use_distributed_optimizer": True,
    f"{MEGATRON}.optimizer.use_precision_aware_optimizer": True,
    "policy.max_grad_norm": 1.0,
    "policy.generation.temperature": 1.0,
    "policy.generation.top_p": 1.0,
}


def stage(nodes, generation, rollouts, batch, length, lr, kl, layout, clip, schedule, save_by, **more):
    """A column of the recipes' table."""
    return {
        "cluster.num_nodes": nodes,
        "policy.generation.colocated.generation_devices": generation,
        "grpo.num_prompts_per_step": rollouts[0],
        "grpo.num_generations_per_prompt": rollouts[1],
        "policy.train_global_batch_size": batch,
        "policy.max_total_sequence_length": length,
        f"{MEGATRON}.optimizer.lr": lr,
        "loss_fn.reference_policy_kl_penalty": kl,
        f"{MEGATRON}.tensor_model_parallel_size": layout[0],
        f"{MEGATRON}.pipeline_model_parallel_size": layout[1],
        f"{MEGATRON}.context_parallel_size": layout[2],
        f"{MEGATRON}.expert_model_parallel_size": layout[3],
        f"{MEGATRON}.sequence_parallel": True,
        "grpo.advantage_clip_high": clip,
        "grpo.advantage_clip_low": None if clip is None else -clip,
        "grpo.max_num_epochs": schedule[0],
        "grpo.val_period": schedule[1],
        "checkpointing.save_period": schedule[2],
        "checkpointing.checkpoint_must_save_by": f"00:{save_by}:00",
        **more,
    }


PENALTY = {
    "grpo.penalize_invalid_tool_call": True,
    "grpo.invalid_tool_call_advantage": -5,
    "grpo.invalid_tool_call_strategy": "",
    "grpo.penalize_malformed_thinking": True,
    "grpo.malformed_thinking_advantage": -5,
}
RLVR = {
    **SUPER3,
    **stage(109, 576, (256, 16), 4096, 49_152, 3e-6, 0, (4, 1, 8, 8), 50, (1, -1, 10), "03:30"),
    **PENALTY,
    "policy.max_total_sequence_length_end": 65_536,
    "policy.generation.vllm_cfg.tensor_parallel_size": 4,
    "policy.generation.vllm_cfg.gpu_memory_utilization": 0.8,
    "env.nemo_gym.num_gpu_nodes": 5,
    "grpo.overlong_filtering": False,
    "grpo.low_effort.enabled": True,
    GENRM_MODEL: GENRM,
    "env.nemo_gym.judge_model.responses_api_models.vllm_model.model": "Qwen/Qwen3-235B-A22B-Instruct-2507-FP8",
    "env.nemo_gym.safety_model.responses_api_models.vllm_model.model": "nvidia/Nemotron-Content-Safety-Reasoning-4B",
    f"{COMPARE}.group_reasoning_length_penalty_coeff": 0.1,
    f"{COMPARE}.group_answer_length_penalty_coeff": 0.1,
    f"{COMPARE}.group_style_penalty_coeff": 0.1,
}
SWE1 = {
    **SUPER3,
    **stage(64, 256, (64, 16), 1024, 131_072, 1e-6, 0, (8, 1, 8, 8), 100, (100, 10, 5), "03:30"),
    "policy.generation.vllm_cfg.tensor_parallel_size": 8,
    "grpo.overlong_filtering": True,
    **PENALTY,
    "grpo.invalid_tool_call_strategy": "mask",
}
RLHF = {
    **SUPER3,
    **stage(72, 256, (128, 16), 2048, 49_152, 1e-6, 1e-4, (4, 1, 4, 8), 50, (1, 10_000, 4), "03:30"),
    **PENALTY,
    "policy.generation.vllm_cfg.tensor_parallel_size": 4,
    "env.nemo_gym.num_gpu_nodes": 8,
    "grpo.overlong_filtering": False,
    "grpo.low_effort.enabled": False,
    GENRM_MODEL: GENRM,
    f"{COMPARE}.use_principle": True,
    f"{COMPARE}.reasoning_bonus": 0.5,
    f"{COMPARE}.group_reasoning_length_penalty_coeff": 0.3,
    f"{COMPARE}.group_answer_length_penalty_coeff": 0.35,
    f"{COMPARE}.group_style_penalty_coeff": 0.05,
}
RECIPES = {
    ("rlvr", "rlvr1"): RLVR,
    ("rlvr", "rlvr2"): RLVR,
    ("rlvr", "rlvr3"): RLVR,
    ("rlvr", "small"): {
        **RLVR,
        "cluster.num_nodes": 21,
        "policy.generation.colocated.generation_devices": 64,
        "grpo.num_prompts_per_step": 128,
        "grpo.num_generations_per_prompt": 8,
        "policy.train_global_batch_size": 1024,
    },
    ("rlvr", "nano3"): {
        **stage(32, None, (128, 16), 2048, 49_152, 3e-6, 0, (2, 2, 4, 8), None, (1, 5, 10), "03:40"),
        "policy.generation.colocated.enabled": True,
        "policy.generation.vllm_cfg.gpu_memory_utilization": 0.5,
        "grpo.async_grpo.enabled": False,
        "grpo.penalize_invalid_tool_call": False,
        "grpo.penalize_malformed_thinking": False,
        "grpo.low_effort.enabled": False,
        "grpo.epsilon_filtering.enabled": True,
        "grpo.epsilon_filtering.limit_end": 0.04,
        GENRM_MODEL: None,
        "env.nemo_gym.genrm_model.responses_api_models.vllm_model.backend": "http",
    },
    ("swe", "swe1"): SWE1,
    ("swe", "swe2"): {
        **SUPER3,
        **stage(64, 256, (16, 32), 512, 196_608, 1e-6, 0, (8, 1, 8, 8), 100, (100, 100, 2), "11:30"),
        "policy.generation.vllm_cfg.tensor_parallel_size": 8,
        "grpo.max_rollout_turns": 200,
        "grpo.overlong_filtering": True,
        **PENALTY,
    },
    ("swe", "small"): {
        **SWE1,
        "cluster.num_nodes": 8,
        "policy.generation.colocated.generation_devices": 32,
        "grpo.num_prompts_per_step": 32,
        "grpo.num_generations_per_prompt": 16,
        "policy.train_global_batch_size": 512,
        "policy.max_total_sequence_length": 32_768,
        f"{MEGATRON}.context_parallel_size": 4,
    },
    ("rlhf", "super3"): RLHF,
    ("rlhf", "small"): {
        **RLHF,
        "cluster.num_nodes": 24,
        "policy.generation.colocated.generation_devices": 64,
        "grpo.num_generations_per_prompt": 8,
        "policy.train_global_batch_size": 1024,
    },
}


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RL_REWARD_MODEL", "GENRM_URL", "JUDGE_URL", "SAFETY_URL"):
            patch.delenv(name, raising=False)
        yield Workbench(home=str(tmp_path_factory.mktemp("home")))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    prompts = tmp_path_factory.mktemp("prompts")
    agent = {"type": "responses_api_agents", "name": "mcqa_simple_agent"}
    row = {"responses_create_params": {"input": "A or B?"}, "expected_answer": "A", "agent_ref": agent}
    (prompts / "train.jsonl").write_text(json.dumps(row) + "\n")
    return {"prompts": str(prompts), "policy": "nvidia/policy"}


def values_of(bench, step, config):
    return bench.compose(f"rl/nemo_rl/{step}", config, ()).flat


@pytest.mark.parametrize(("step", "config"), RECIPES)
def test_a_stage_has_the_values_of_its_recipe(step, config, bench):
    values = values_of(bench, step, config)
    wanted = RECIPES[step, config]
    assert {key: values.get(key) for key in wanted} == wanted


@pytest.mark.parametrize(("step", "config"), CONFIGS)
def test_a_stage_is_planned_without_a_problem_and_fits_its_gpus(step, config, bench, inputs):
    planned = bench.plan(Asked(targets=(f"rl/nemo_rl/{step}",), config=config, inputs=inputs))
    rl = RlConfig.model_validate(next(s for s in planned if s.step_id.endswith(step)).config)
    judges = {role: judge for role in JUDGE_ROLES if (judge := rl.env.nemo_gym.judge(role)) and judge.backend == "vllm"}
    plan = DevicePlan.of(rl, judges)
    assert sum(plan.judge_devices) <= rl.env.nemo_gym.num_gpu_nodes * rl.cluster.gpus_per_node
    if rl.grpo.async_grpo.enabled:
        # Longer than a rollout of the longest length takes at 20 tokens a second.
        longest = rl.policy.generation.max_new_tokens / 20
        assert rl.grpo.async_grpo.straggler_deadline_s >= min(longest, 7200)


@pytest.mark.parametrize("gpus", [2, 4, 8])
@pytest.mark.parametrize("step", ["rlvr", "swe", "rlhf"])
def test_one_node_works_with_fewer_gpus(step, gpus, bench, inputs):
    fewer = (f"cluster.gpus_per_node={gpus}",)
    bench.plan(Asked(targets=(f"rl/nemo_rl/{step}",), config="one_node", inputs=inputs, overrides=fewer))


def test_the_rlvr_stages_differ_in_their_data_only(bench):
    stages = [bench.compose("rl/nemo_rl/rlvr", f"rlvr{number}", ()) for number in (1, 2, 3)]
    assert stages[0].values == stages[1].values == stages[2].values
    assert [s.inputs["prompts"]["config"] for s in stages] == ["super3_rlvr1", "super3_rlvr2", "super3_rlvr3"]


def test_one_prompt_in_fifty_asks_for_brevity_early_and_one_in_a_hundred_late_and_none_of_code(bench):
    low = RlConfig.model_validate(bench.compose("rl/nemo_rl/rlvr", "rlvr1", ()).values).grpo.low_effort
    assert (low.weight, low.penalty, low.upper_bound_tokens, low.fraction) == (0.2, 1, 3000, 0.02)
    late = {name: low.share_at_end(name) for name in low.environments}
    assert late == {"math_with_judge": 0.01, "mcqa": 0.01, "code_gen": 0.0}
    assert not asks_for_low_effort("any", "code_gen", low, fraction=late["code_gen"], seed=0)
