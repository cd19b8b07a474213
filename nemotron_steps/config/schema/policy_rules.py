"""Settings of the policy that its backend would ignore: refused with the config. As rl_rules.py, for policy.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nemotron_steps.config.schema.base import Rule

if TYPE_CHECKING:
    from nemotron_steps.config.schema.policy import OptimizerConfig, PolicyConfig, SchedulerConfig, VllmConfig

_MEGATRON_ALONE = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "sequence_parallel",
    "activation_checkpointing",
    "freeze_moe_router",
    "moe_router_bias_update_rate",
)
"""Keys of `megatron_cfg` that the dtensor policy does not read; it takes optimizer and scheduler from there."""
_OPTIMIZER_OF_MEGATRON_ALONE = ("use_precision_aware_optimizer", "use_distributed_optimizer")


def policy_rules(config: PolicyConfig) -> list[Rule]:
    """Rules of `policy`."""
    return [*_dtensor_rules(config), *_batching_rules(config)]


def scheduler_rules(config: SchedulerConfig) -> list[Rule]:
    """Rules of `policy.megatron_cfg.scheduler`."""
    decays, iters, warmup = config.lr_decay_style != "constant", config.lr_decay_iters, config.lr_warmup_iters
    return [
        Rule(
            decays and iters is not None and iters <= warmup,
            "lr_decay_iters",
            f"lr_decay_iters={iters} ends before the warm-up of lr_warmup_iters={warmup} does",
            ("lr_decay_iters=null", f"lr_decay_iters={warmup + 1}"),
        ),
        Rule(
            not decays and iters is not None,
            "lr_decay_iters",
            "lr_decay_iters is ignored while lr_decay_style is constant",
            ("lr_decay_style=cosine", "lr_decay_iters=null"),
        ),
    ]


def optimizer_rules(config: OptimizerConfig) -> list[Rule]:
    """Rules of `policy.megatron_cfg.optimizer`."""
    narrow = [key for key in ("exp_avg_dtype", "exp_avg_sq_dtype") if getattr(config, key) != "float32"]
    return [
        *(
            Rule(
                not config.use_precision_aware_optimizer,
                key,
                f"{key}=bfloat16 needs use_precision_aware_optimizer=true",
                ("use_precision_aware_optimizer=true", f"{key}=float32"),
            )
            for key in narrow
        ),
        # Half of bfloat16's spacing is up to 2^-8 of a number: a smaller decay would be rounded away at every step.
        Rule(
            "exp_avg_sq_dtype" in narrow and config.adam_beta2 > 1 - 2**-8,
            "exp_avg_sq_dtype",
            f"exp_avg_sq_dtype=bfloat16 needs adam_beta2 <= 0.996, not {config.adam_beta2}: a slower decay is lost in "
            "rounding",
            ("exp_avg_sq_dtype=float32", "adam_beta2=0.995"),
        ),
    ]


def vllm_rules(config: VllmConfig) -> list[Rule]:
    """Rules of `policy.generation.vllm_cfg`."""
    experts, width = config.expert_parallel_size, config.tensor_parallel_size
    return [
        Rule(
            experts not in (1, width),
            "expert_parallel_size",
            f"expert_parallel_size is 1 or tensor_parallel_size ({width}), not {experts}",
            (f"expert_parallel_size={width}", "expert_parallel_size=1"),
        )
    ]


def _dtensor_rules(config: PolicyConfig) -> list[Rule]:
    megatron, dtensor = config.megatron_cfg, config.dtensor_cfg
    optimizer = [
        Rule(
            dtensor.enabled and getattr(megatron.optimizer, key),
            f"megatron_cfg.optimizer.{key}",
            f"policy.megatron_cfg.optimizer.{key} is for the megatron policy: the dtensor policy keeps float32 weights "
            "and moments, sharded by FSDP",
            (f"megatron_cfg.optimizer.{key}=false", "dtensor_cfg.enabled=false"),
        )
        for key in _OPTIMIZER_OF_MEGATRON_ALONE
    ]
    ignored = [
        Rule(
            dtensor.enabled and value != default,
            f"megatron_cfg.{key}",
            f"policy.megatron_cfg.{key} is for the megatron policy, and policy.dtensor_cfg.enabled is true",
            (f"{_of_dtensor(key, value)}megatron_cfg.{key}={_text(default)}", "dtensor_cfg.enabled=false"),
        )
        for key, value, default in _values(megatron)
        if key in _MEGATRON_ALONE
    ]
    ignored += [
        Rule(
            not dtensor.enabled and value != default,
            f"dtensor_cfg.{key}",
            f"policy.dtensor_cfg.{key} is ignored while policy.dtensor_cfg.enabled is false",
            ("dtensor_cfg.enabled=true", f"dtensor_cfg.{key}={_text(default)}"),
        )
        for key, value, default in _values(dtensor)
    ]
    nothing = Rule(
        not dtensor.enabled and not megatron.enabled,
        "megatron_cfg.enabled",
        "neither policy.megatron_cfg nor policy.dtensor_cfg is enabled: there is no policy to train",
        ("megatron_cfg.enabled=true", "dtensor_cfg.enabled=true"),
    )
    return [*optimizer, *ignored, nothing]


def _batching_rules(config: PolicyConfig) -> list[Rule]:
    packed, dynamic = config.sequence_packing.enabled, config.dynamic_batching.enabled
    return [
        Rule(
            packed and dynamic,
            "dynamic_batching.enabled",
            "policy.sequence_packing and policy.dynamic_batching both decide what a micro-batch holds",
            ("dynamic_batching.enabled=false", "sequence_packing.enabled=false"),
        ),
        Rule(
            packed and config.dtensor_cfg.enabled,
            "sequence_packing.enabled",
            "the dtensor policy pads every sequence to the longest of its micro-batch: it cannot pack",
            ("sequence_packing.enabled=false dynamic_batching.enabled=true", "dtensor_cfg.enabled=false"),
        ),
    ]


def _values(section: Any) -> list[tuple[str, Any, Any]]:
    """(key, value, default) of a section's keys."""
    return [(key, getattr(section, key), info.default) for key, info in type(section).model_fields.items()]


def _of_dtensor(key: str, value: Any) -> str:
    """The override that means the same to the dtensor policy, and a space; empty if there is none."""
    same = {
        "tensor_model_parallel_size": "tensor_parallel_size",
        "activation_checkpointing": "activation_checkpointing",
    }.get(key)
    return f"dtensor_cfg.{same}={_text(value)} " if same is not None else ""


def _text(value: Any) -> str:
    """A value as an override writes it."""
    return str(value).lower()
