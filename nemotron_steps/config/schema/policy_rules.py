"""Settings of the policy that its backend would ignore: refused with the config. As rl_rules.py, for policy.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nemotron_steps.config.schema.base import Rule

if TYPE_CHECKING:
    from nemotron_steps.config.schema.policy import (
        GeneratingPolicyConfig,
        MegatronConfig,
        OptimizerConfig,
        PolicyConfig,
        SchedulerConfig,
        TorchSchedulerConfig,
        VllmConfig,
    )

_MEGATRON_ALONE = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "sequence_parallel",
    "activation_checkpointing",
    "freeze_moe_router",
    "moe_router_bias_update_rate",
    "mtp_num_layers",
)
"""Keys of `megatron_cfg` that the dtensor policy does not read, besides its optimizer and scheduler."""
_TORCH_NAMES = {"lr": "lr", "weight_decay": "weight_decay", "adam_eps": "eps"}
"""Keys of Megatron's optimizer that mean the same under another name in `policy.optimizer.kwargs`."""
_SCHEDULER_KWARGS = {
    "LinearLR": ("start_factor", "end_factor", "total_iters"),
    "ConstantLR": ("factor", "total_iters"),
    "CosineAnnealingLR": ("T_max", "eta_min"),
}


def policy_rules(config: PolicyConfig) -> list[Rule]:
    """Rules of `policy`."""
    return [
        *_dtensor_rules(config),
        *_optimizer_place_rules(config),
        *_batching_rules(config),
        _prediction_rule(config.megatron_cfg),
    ]


def _prediction_rule(config: MegatronConfig) -> Rule:
    """Published configs leave multi-token prediction out with a factor of 0 as well."""
    return Rule(
        config.mtp_num_layers > 0 and config.mtp_loss_scaling_factor == 0,
        "megatron_cfg.mtp_loss_scaling_factor",
        f"mtp_num_layers={config.mtp_num_layers} trains nothing where mtp_loss_scaling_factor is 0",
        ("megatron_cfg.mtp_loss_scaling_factor=0.1", "megatron_cfg.mtp_num_layers=0"),
    )


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
        Rule(
            config.lr_warmup_init > 0 and warmup == 0,
            "lr_warmup_init",
            "lr_warmup_init is ignored without a warm-up: lr_warmup_iters is 0",
            ("lr_warmup_iters=10", "lr_warmup_init=0"),
        ),
    ]


def torch_scheduler_rules(config: TorchSchedulerConfig) -> list[Rule]:
    """Rules of one entry of `policy.scheduler`."""
    known = _SCHEDULER_KWARGS.get((config.name or "").rpartition(".")[2], ())
    unknown = sorted(set(config.kwargs) - set(known))
    return [
        Rule(
            (config.name is None) == (config.milestones is None) or (config.name is None and bool(config.kwargs)),
            "name",
            "an entry of policy.scheduler is a scheduler (name, kwargs) or milestones",
            ("name=torch.optim.lr_scheduler.ConstantLR milestones=null",),
        ),
        Rule(
            config.name is not None and bool(unknown),
            "kwargs",
            f"{config.name} takes {', '.join(known)}, not {', '.join(unknown)}",
            ("kwargs={}",),
        ),
    ]


def _sequence_rule(config: PolicyConfig) -> Rule:
    """Schedulers one after another need the steps between them, once and at the end."""
    entries = config.scheduler or ()
    schedulers = sum(entry.name is not None for entry in entries)
    steps = [step for entry in entries for step in entry.milestones or ()]
    at_end = all(entry.name is not None for entry in entries[:-1])
    return Rule(
        config.scheduler is not None
        and (schedulers == 0 or len(steps) != schedulers - 1 or not at_end or steps != sorted(steps)),
        "scheduler",
        f"policy.scheduler has {schedulers} schedulers and {len(steps)} milestones: between each two of them is one "
        "step, rising, in one last entry",
        ("scheduler=null",),
    )


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
        Rule(
            config.lr * config.weight_decay > 0.01,
            "weight_decay",
            f"lr x weight_decay = {config.lr * config.weight_decay:g} of every weight is lost in every step",
            ("weight_decay=0.01",),
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


def router_replay_rules(config: GeneratingPolicyConfig) -> list[Rule]:
    """Rules of `policy.router_replay`."""
    on, off = config.router_replay.enabled, "router_replay.enabled=false"
    return [
        Rule(
            on and config.dtensor_cfg.enabled,
            "router_replay.enabled",
            "the dtensor policy cannot replay experts: policy.router_replay is for the megatron policy",
            (off, "dtensor_cfg.enabled=false"),
        ),
        Rule(
            on and config.generation.vllm_cfg.expose_http_server,
            "router_replay.enabled",
            "answers over HTTP come without the experts that policy.router_replay replays",
            (off, "generation.vllm_cfg.expose_http_server=false"),
        ),
    ]


def _dtensor_rules(config: PolicyConfig) -> list[Rule]:
    megatron, dtensor = config.megatron_cfg, config.dtensor_cfg
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
        if key != "lora_cfg"
    ]
    nothing = Rule(
        not dtensor.enabled and not megatron.enabled,
        "megatron_cfg.enabled",
        "neither policy.megatron_cfg nor policy.dtensor_cfg is enabled: there is no policy to train",
        ("megatron_cfg.enabled=true", "dtensor_cfg.enabled=true"),
    )
    adapters = Rule(
        dtensor.enabled and megatron.peft.enabled,
        "megatron_cfg.peft.enabled",
        "policy.megatron_cfg.peft is for the megatron policy, and policy.dtensor_cfg.enabled is true",
        ("dtensor_cfg.enabled=false", "megatron_cfg.peft.enabled=false"),
    )
    lora = Rule(
        not dtensor.enabled and dtensor.lora_cfg.enabled,
        "dtensor_cfg.lora_cfg.enabled",
        "policy.dtensor_cfg.lora_cfg is for the dtensor policy, and policy.dtensor_cfg.enabled is false",
        ("dtensor_cfg.lora_cfg.enabled=false megatron_cfg.peft.enabled=true", "dtensor_cfg.enabled=true"),
    )
    return [*ignored, nothing, adapters, lora]


def _optimizer_place_rules(config: PolicyConfig) -> list[Rule]:
    """Each policy has an optimizer and a scheduler in its own place."""
    megatron, dtensor = config.megatron_cfg, config.dtensor_cfg
    of_megatron = [
        Rule(
            dtensor.enabled and value != default,
            f"megatron_cfg.{section}.{key}",
            f"policy.megatron_cfg.{section}.{key} is for the megatron policy: the dtensor policy has policy.{section}",
            (f"{_of_torch(section, key, value)}megatron_cfg.{section}.{key}={_text(default)}",),
        )
        for section in ("optimizer", "scheduler")
        for key, value, default in _values(getattr(megatron, section))
    ]
    of_dtensor = [
        Rule(
            not dtensor.enabled and getattr(config, section) is not None,
            section,
            f"policy.{section} is for the dtensor policy: the megatron policy has policy.megatron_cfg.{section}",
            (f"{section}=null",),
        )
        for section in ("optimizer", "scheduler")
    ]
    return [*of_megatron, *of_dtensor, _sequence_rule(config)]


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


def _of_torch(section: str, key: str, value: Any) -> str:
    """The override of `policy.optimizer` that means the same, and a space; empty if there is none."""
    same = _TORCH_NAMES.get(key) if section == "optimizer" else None
    return f"optimizer.kwargs.{same}={_text(value)} " if same is not None else ""


def _text(value: Any) -> str:
    """A value as an override writes it."""
    return str(value).lower()
