"""Combinations of GRPO settings that have no meaning, or would silently ignore one of them: refused with the config.

Each function lists the rules of one section of rl.py, whose validators raise those that are broken. Not here: what one
key alone may be (its field), and what depends on data or machines (steps/preflight.py, resolver/checks.py).
"""

from __future__ import annotations

import tomllib
from importlib.resources import files
from typing import TYPE_CHECKING

from nemotron_steps.config.names import nearest
from nemotron_steps.config.schema.base import Rule
from nemotron_steps.config.schema.durations import is_duration
from nemotron_steps.config.schema.vllm_options import OF_POLICY, option_rules

if TYPE_CHECKING:
    from nemotron_steps.config.schema.rl import (
        CheckpointingConfig,
        EnvConfig,
        GrpoConfig,
        LossFnConfig,
        LowEffortConfig,
        RewardPenaltiesConfig,
        RewardScalingConfig,
        RewardShapingConfig,
        RlConfig,
        SignalsConfig,
        VllmModelConfig,
    )


def reward_scaling_rules(config: RewardScalingConfig) -> list[Rule]:
    """Rules of `grpo.reward_scaling`."""
    return [
        Rule(
            config.enabled and config.source_min >= config.source_max,
            "source_min",
            f"the source interval of grpo.reward_scaling is empty: source_min {config.source_min:g} is not below "
            f"source_max {config.source_max:g}",
            ("source_min=0 source_max=1", "enabled=false"),
        )
    ]


def reward_shaping_rules(config: RewardShapingConfig) -> list[Rule]:
    """Rules of `grpo.reward_shaping`."""
    own = {"overlong_buffer_length": 128, "overlong_buffer_penalty": 1.0, "max_response_length": None}
    return [
        Rule(
            config.stop_properly_penalty_coef is not None and getattr(config, key) != default,
            key,
            f"grpo.reward_shaping.{key} is ignored: stop_properly_penalty_coef takes the overlong penalty's place",
            ("stop_properly_penalty_coef=null", f"{key}={'null' if default is None else f'{default:g}'}"),
        )
        for key, default in own.items()
    ]


def low_effort_rules(config: LowEffortConfig) -> list[Rule]:
    """Rules of `grpo.low_effort`."""
    return [
        Rule(
            bool(config.string) and not config.weight,
            "string",
            "grpo.low_effort.string is ignored: grpo.low_effort.weight=0 shapes no reward",
            ("weight=0.2", "string=''"),
        ),
        Rule(
            not config.string and config.weight > 0,
            "weight",
            "grpo.low_effort.weight is ignored without grpo.low_effort.string, which says whose rewards it shapes",
            ("weight=0",),
        ),
    ]


def grpo_rules(config: GrpoConfig) -> list[Rule]:
    """Rules of `grpo`."""
    estimator, low, high = config.adv_estimator, config.advantage_clip_low, config.advantage_clip_high
    centred = estimator.name != "reinforce_plus_plus" or estimator.minus_baseline
    plus_plus = estimator.name == "reinforce_plus_plus"
    return [
        Rule(
            low is not None and high is not None and low > high,
            "advantage_clip_low",
            f"grpo.advantage_clip_low={low} is above grpo.advantage_clip_high={high}",
            ("advantage_clip_low=null advantage_clip_high=null",),
        ),
        Rule(
            config.batch_multiplier != 1 and not config.use_dynamic_sampling,
            "batch_multiplier",
            f"grpo.batch_multiplier={config.batch_multiplier:g} samples more prompts than a step trains on, and only "
            "grpo.use_dynamic_sampling chooses among them",
            ("batch_multiplier=1", "use_dynamic_sampling=true"),
        ),
        Rule(
            config.batch_multiplier != 1 and config.async_grpo.enabled,
            "batch_multiplier",
            "grpo.batch_multiplier is ignored by grpo.async_grpo, which samples prompts one by one as there is room",
            ("batch_multiplier=1", "async_grpo.enabled=false"),
        ),
        Rule(
            config.val_start_at > 0 and config.val_period <= 0,
            "val_start_at",
            f"grpo.val_start_at={config.val_start_at} delays validations, of which grpo.val_period={config.val_period} "
            "asks for none",
            ("val_start_at=-1", "val_period=10"),
        ),
        Rule(
            config.num_generations_per_prompt == 1 and centred,
            "num_generations_per_prompt",
            "grpo.num_generations_per_prompt=1 leaves nothing to compare an answer with: every advantage would be 0",
            (
                "num_generations_per_prompt=8",
                "adv_estimator.name=reinforce_plus_plus adv_estimator.minus_baseline=false",
            ),
        ),
        Rule(
            config.epsilon_filtering.enabled
            and config.reward_scaling.enabled
            and (config.reward_scaling.target_min, config.reward_scaling.target_max) != (0, 1),
            "epsilon_filtering.enabled",
            "grpo.epsilon_filtering looks for groups whose scaled reward is near 0 or 1, and grpo.reward_scaling maps "
            f"rewards onto [{config.reward_scaling.target_min:g}, {config.reward_scaling.target_max:g}]",
            ("reward_scaling.target_min=0 reward_scaling.target_max=1", "epsilon_filtering.enabled=false"),
        ),
        Rule(
            estimator.name == "gdpo" and len(estimator.components) < 2,
            "adv_estimator.components" if estimator.components else "adv_estimator.name",
            "grpo.adv_estimator.name=gdpo needs at least two reward components to normalise apart from each other, not "
            f"{', '.join(estimator.components) or 'none'}",
            ("adv_estimator.components=[NAME,NAME]", "adv_estimator.name=grpo"),
        ),
        Rule(
            estimator.name == "gdpo" and config.low_effort.enabled,
            "low_effort.string",
            "grpo.low_effort adds to the reward, which grpo.adv_estimator.name=gdpo takes apart: no component has it",
            ("low_effort.string='' low_effort.weight=0", "adv_estimator.name=grpo adv_estimator.components=[]"),
        ),
        Rule(
            estimator.name == "gdpo"
            and config.reward_shaping.enabled
            and config.reward_shaping.stop_properly_penalty_coef is None,
            "reward_shaping.enabled",
            "grpo.reward_shaping adds an overlong penalty to the reward, which grpo.adv_estimator.name=gdpo takes "
            "apart: no component has it",
            (
                "reward_shaping.enabled=false",
                "reward_shaping.stop_properly_penalty_coef=0.5",
                "adv_estimator.name=grpo adv_estimator.components=[]",
            ),
        ),
        Rule(
            estimator.reward_weights is not None and len(estimator.reward_weights) != len(estimator.components),
            "adv_estimator.reward_weights",
            f"grpo.adv_estimator.reward_weights has {len(estimator.reward_weights or ())} entries for "
            f"{len(estimator.components)} components",
            ("adv_estimator.reward_weights=null",),
        ),
        Rule(
            estimator.reward_weights is not None and list(estimator.components) != sorted(estimator.components),
            "adv_estimator.components",
            "grpo.adv_estimator.reward_weights are in the alphabetical order of the components, which these are not in",
            (f"adv_estimator.components=[{','.join(sorted(estimator.components))}]",),
        ),
        Rule(
            estimator.name != "gdpo" and bool(estimator.components),
            "adv_estimator.components",
            f"grpo.adv_estimator.components is ignored by {estimator.name}: only gdpo takes the components apart",
            ("adv_estimator.name=gdpo", "adv_estimator.components=[]"),
        ),
        Rule(
            not plus_plus and not estimator.minus_baseline,
            "adv_estimator.minus_baseline",
            f"grpo.adv_estimator.minus_baseline is ignored by {estimator.name}, which always subtracts a baseline",
            ("adv_estimator.name=reinforce_plus_plus", "adv_estimator.minus_baseline=true"),
        ),
        *(
            Rule(
                plus_plus and not getattr(config, key),
                key,
                f"grpo.{key} is ignored by reinforce_plus_plus, which normalises over the whole batch",
                (f"{key}=true", "adv_estimator.name=grpo"),
            )
            for key in ("normalize_rewards", "use_leave_one_out_baseline")
        ),
        *(
            Rule(
                bool(getattr(config, f"penalize_{fault}"))
                and getattr(config, f"{fault}_advantage") is None
                and not masked,
                f"penalize_{fault}",
                f"grpo.penalize_{fault} needs grpo.{fault}_advantage, the advantage that such a turn gets",
                (f"{fault}_advantage=-5", f"penalize_{fault}=false"),
            )
            for fault, masked in (
                ("invalid_tool_call", config.invalid_tool_call_strategy == "mask"),
                ("malformed_thinking", False),
            )
        ),
    ]


def reward_penalty_rules(config: RewardPenaltiesConfig) -> list[Rule]:
    """Rules of `reward_penalties`."""
    ids = config.token_ids
    return [
        Rule(
            config.penalize_unwanted_tokens and not ids.unwanted,
            "penalize_unwanted_tokens",
            "reward_penalties.penalize_unwanted_tokens needs the tokens' ids, reward_penalties.token_ids.unwanted",
            ("penalize_unwanted_tokens=false",),
        ),
        Rule(
            bool(ids.unwanted) and not config.penalize_unwanted_tokens,
            "token_ids.unwanted",
            "reward_penalties.token_ids.unwanted is ignored without reward_penalties.penalize_unwanted_tokens",
            ("penalize_unwanted_tokens=true", "token_ids.unwanted=[]"),
        ),
        *(
            Rule(
                getattr(ids, name) is not None and not config.penalize_malformed_think_tag,
                f"token_ids.{name}",
                f"reward_penalties.token_ids.{name} is ignored without reward_penalties.penalize_malformed_think_tag",
                ("penalize_malformed_think_tag=true", f"token_ids.{name}=null"),
            )
            for name in ("think_open", "think_close")
        ),
    ]


def loss_rules(config: LossFnConfig) -> list[Rule]:
    """Rules of `loss_fn`."""
    return [*_ratio_rules(config), *_correction_rules(config), *_kl_rules(config)]


def _ratio_rules(config: LossFnConfig) -> list[Rule]:
    return [
        Rule(
            config.sequence_level_importance_ratios and config.token_level_loss,
            "sequence_level_importance_ratios",
            "loss_fn.sequence_level_importance_ratios (GSPO) needs a sequence-level loss",
            ("token_level_loss=false",),
        ),
        Rule(
            config.disable_ppo_ratio and config.force_on_policy_ratio,
            "disable_ppo_ratio",
            "loss_fn.disable_ppo_ratio removes the ratio that loss_fn.force_on_policy_ratio sets",
            ("force_on_policy_ratio=false",),
        ),
        Rule(
            config.ratio_clip_c is not None and (config.disable_ppo_ratio or config.use_cispo),
            "ratio_clip_c",
            "loss_fn.ratio_clip_c bounds a ratio that disable_ppo_ratio or use_cispo takes out of the loss",
            ("ratio_clip_c=null",),
        ),
        Rule(
            config.ratio_clip_c is not None and config.force_on_policy_ratio,
            "ratio_clip_c",
            "loss_fn.ratio_clip_c bounds a ratio that loss_fn.force_on_policy_ratio keeps at 1",
            ("ratio_clip_c=null", "force_on_policy_ratio=false"),
        ),
        Rule(
            config.disable_ppo_ratio and config.sequence_level_importance_ratios,
            "disable_ppo_ratio",
            "loss_fn.disable_ppo_ratio removes the ratio that loss_fn.sequence_level_importance_ratios averages",
            ("sequence_level_importance_ratios=false",),
        ),
        Rule(
            config.use_cispo
            and (
                config.disable_ppo_ratio
                or config.force_on_policy_ratio
                or config.sequence_level_importance_ratios
                or not config.token_level_loss
            ),
            "use_cispo",
            "loss_fn.use_cispo is a token-level loss on the clipped ratio lp - lp_prev",
            ("use_cispo=false",),
        ),
    ]


_USUAL_BOUNDS = {"tis": (None, 5.0), "icepop": (0.5, 5.0), "seq-mask-tis": (0.999, 1.002)}
"""Truncation type -> the recipes' lower and upper bound."""


def _correction_rules(config: LossFnConfig) -> list[Rule]:
    truncation = config.truncated_importance_sampling_type
    upper, lower = config.truncated_importance_sampling_ratio, config.truncated_importance_sampling_ratio_min
    usual_lower, usual_upper = _USUAL_BOUNDS[truncation or "tis"]
    return [
        Rule(
            truncation is not None and not config.use_importance_sampling_correction,
            "truncated_importance_sampling_type",
            "loss_fn.truncated_importance_sampling_type truncates weights that are not used",
            ("use_importance_sampling_correction=true",),
        ),
        Rule(
            truncation is not None and upper is None,
            "truncated_importance_sampling_type",
            f"loss_fn.truncated_importance_sampling_type={truncation} needs truncated_importance_sampling_ratio",
            (f"truncated_importance_sampling_ratio={usual_upper:g}",),
        ),
        Rule(
            truncation is None and (upper is not None or lower is not None),
            "truncated_importance_sampling_ratio",
            "loss_fn.truncated_importance_sampling_ratio is set but no truncation type is chosen",
            ("truncated_importance_sampling_type=tis",),
        ),
        Rule(
            truncation in ("icepop", "seq-mask-tis") and lower is None,
            "truncated_importance_sampling_type",
            f"loss_fn.truncated_importance_sampling_type={truncation} needs a lower bound",
            (f"truncated_importance_sampling_ratio_min={usual_lower}",),
        ),
        Rule(
            upper is not None and lower is not None and lower > upper,
            "truncated_importance_sampling_ratio_min",
            f"loss_fn.truncated_importance_sampling_ratio_min={lower} is above truncated_importance_sampling_ratio="
            f"{upper}",
            ("truncated_importance_sampling_ratio_min=null",),
        ),
        Rule(
            truncation == "seq-mask-tis" and config.sequence_level_importance_ratios,
            "truncated_importance_sampling_type",
            "seq-mask-tis weighs tokens, loss_fn.sequence_level_importance_ratios weighs sequences",
            ("truncated_importance_sampling_type=tis",),
        ),
    ]


def _kl_rules(config: LossFnConfig) -> list[Rule]:
    return [
        Rule(
            config.use_kl_in_reward and config.reference_policy_kl_penalty == 0,
            "use_kl_in_reward",
            "loss_fn.use_kl_in_reward is on but loss_fn.reference_policy_kl_penalty is 0",
            ("use_kl_in_reward=false", "reference_policy_kl_penalty=0.0001"),
        ),
        Rule(
            config.use_kl_in_reward and config.use_on_policy_kl_approximation,
            "use_on_policy_kl_approximation",
            "loss_fn.use_on_policy_kl_approximation weighs a KL loss that loss_fn.use_kl_in_reward removes",
            ("use_on_policy_kl_approximation=false",),
        ),
    ]


def checkpointing_rules(config: CheckpointingConfig) -> list[Rule]:
    """Rules of `checkpointing`."""
    limit = config.checkpoint_must_save_by
    return [
        Rule(
            limit is not None and not is_duration(limit),
            "checkpoint_must_save_by",
            f"checkpointing.checkpoint_must_save_by={limit} is no duration: HH:MM, HH:MM:SS or DD:HH:MM:SS, with at "
            "most 59 minutes and seconds",
            ("checkpoint_must_save_by=00:03:30:00", "checkpoint_must_save_by=null"),
        )
    ]


def judge_rules(config: VllmModelConfig) -> list[Rule]:
    """Rules of a judge's `vllm_model`."""
    return [
        Rule(
            config.backend == "http" and not config.base_url,
            "backend",
            "a judge with backend=http needs the base_url of its server",
            ("base_url=http://127.0.0.1:8000/v1",),
        ),
        Rule(
            config.backend != "http" and config.base_url is not None,
            "base_url",
            f"a judge's base_url is that of its server, and backend={config.backend} starts the judge itself",
            ("backend=http", "base_url=null"),
        ),
        Rule(
            config.tensor_parallel_size > 1 and config.backend != "vllm",
            "tensor_parallel_size",
            f"a judge's tensor_parallel_size={config.tensor_parallel_size} needs backend=vllm, not {config.backend}",
            ("backend=vllm", "tensor_parallel_size=1"),
        ),
    ]


def env_rules(config: EnvConfig) -> list[Rule]:
    """Rules of `env`."""
    return [
        Rule(
            not config.should_use_nemo_gym and config.environment is None,
            "should_use_nemo_gym",
            "env.should_use_nemo_gym=false needs env.environment, the one that every row goes to",
            ("environment=NAME", "should_use_nemo_gym=true"),
        )
    ]


def signals_rules(config: SignalsConfig) -> list[Rule]:
    """Rules of `signals`."""
    known = tomllib.loads((files("nemotron_steps.errors") / "signals.toml").read_text()) if config.stop_on else {}
    known.pop("out_of_memory", None)  # told with a failure
    unknown = [name for name in config.stop_on if name not in known]
    meant = [next(iter(nearest(name, known)), "") if name in unknown else name for name in config.stop_on]
    told = f"signals.stop_on: there is no signal {', '.join(unknown)}; there are {', '.join(known)}"
    return [Rule(bool(unknown), "stop_on", told, (f"stop_on=[{','.join(filter(None, meant))}]",))]


def run_rules(config: RlConfig) -> list[Rule]:
    """Rules over the sections of a whole config."""
    rollouts = config.grpo.num_prompts_per_step * config.grpo.num_generations_per_prompt
    batch, on_policy = config.policy.train_global_batch_size, config.loss_fn.force_on_policy_ratio
    generation = config.policy.generation
    whole_batch = (f"policy.train_global_batch_size={rollouts}",)
    return [
        *option_rules(generation, "policy.generation", OF_POLICY),
        Rule(
            config.grpo.adv_estimator.name == "opd" and not hasattr(config, "on_policy_distillation"),
            "grpo.adv_estimator.name",
            "grpo.adv_estimator.name=opd needs teachers, which the step rl/nemo_rl/opd has",
            ("grpo.adv_estimator.name=grpo",),
        ),
        Rule(
            on_policy and batch != rollouts,
            "policy.train_global_batch_size",
            "loss_fn.force_on_policy_ratio needs policy.train_global_batch_size = num_prompts_per_step x "
            f"num_generations_per_prompt = {rollouts}, not {batch}",
            (*whole_batch, "loss_fn.force_on_policy_ratio=false"),
        ),
        Rule(
            not on_policy and rollouts % batch != 0,
            "policy.train_global_batch_size",
            f"grpo.num_prompts_per_step x num_generations_per_prompt = {rollouts} is not a multiple of "
            f"policy.train_global_batch_size = {batch}",
            whole_batch,
        ),
        Rule(
            config.grpo.async_grpo.enabled and on_policy and not config.loss_fn.use_importance_sampling_correction,
            "loss_fn.force_on_policy_ratio",
            "loss_fn.force_on_policy_ratio with grpo.async_grpo trains on rollouts of older weights as if they were of "
            "the newest, unless loss_fn.use_importance_sampling_correction weighs them",
            (
                "loss_fn.use_importance_sampling_correction=true loss_fn.truncated_importance_sampling_type=tis "
                "loss_fn.truncated_importance_sampling_ratio=5",
                "loss_fn.force_on_policy_ratio=false",
            ),
        ),
        Rule(
            config.grpo.adv_estimator.name == "gdpo" and config.reward_penalties.any_enabled,
            "grpo.adv_estimator.name",
            "reward_penalties take a rollout's reward away, and would leave it the components that "
            "grpo.adv_estimator.name=gdpo takes it apart into",
            ("grpo.adv_estimator.name=grpo grpo.adv_estimator.components=[]",),
        ),
        Rule(
            (generation.top_p < 1 or generation.top_k > 0) and config.loss_fn.reference_policy_kl_penalty != 0,
            "policy.generation.top_p" if generation.top_p < 1 else "policy.generation.top_k",
            "under top_p or top_k the policy's logprobs are of the tokens that it keeps, and the KL to the reference, "
            "which loss_fn.reference_policy_kl_penalty weighs, would compare two different sets of tokens",
            ("policy.generation.top_p=1 policy.generation.top_k=0", "loss_fn.reference_policy_kl_penalty=0"),
        ),
        Rule(
            generation.temperature == 0,
            "policy.generation.temperature",
            "policy.generation.temperature=0 samples the same answer every time: a group has nothing to learn from",
            ("policy.generation.temperature=1",),
        ),
        *_token_budget_rules(config),
    ]


def _token_budget_rules(config: RlConfig) -> list[Rule]:
    """The longest rollout fits into a micro-batch: else the first that is as long would end the run."""
    policy, answer = config.policy, config.policy.generation.max_new_tokens
    longest = max(policy.max_total_sequence_length, policy.max_total_sequence_length_end or 0)
    rules = [
        Rule(
            answer > longest and answer != 512,  # as it is by default
            "policy.generation.max_new_tokens",
            f"policy.generation.max_new_tokens={answer} is never reached: sequences end at {longest} tokens",
            (f"policy.max_total_sequence_length={answer}", f"policy.generation.max_new_tokens={longest}"),
        )
    ]
    for section in ("sequence_packing", "dynamic_batching"):
        settings = getattr(policy, section)
        rounding = settings.sequence_length_round if policy.dtensor_cfg.enabled else 1
        needed = -(-longest // rounding) * rounding
        for name in ("train_mb_tokens", "logprob_mb_tokens"):
            budget, key = getattr(settings, name), f"policy.{section}.{name}"
            rules.append(
                Rule(
                    settings.enabled and budget is not None and budget < needed,
                    key,
                    f"{key}={budget} does not hold a rollout of {longest} tokens, which policy."
                    f"max_total_sequence_length{'_end' if longest > policy.max_total_sequence_length else ''} allows",
                    (f"{key}={needed}", f"{key}=null"),
                )
            )
    return rules
