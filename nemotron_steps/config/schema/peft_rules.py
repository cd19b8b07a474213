"""Settings of adapters that have no meaning, or that their policy would ignore. As policy_rules.py, for peft.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nemotron_steps.config.schema.base import Rule

if TYPE_CHECKING:
    from nemotron_steps.config.schema.peft import AdapterConfig
    from nemotron_steps.config.schema.policy import GeneratingPolicyConfig, PolicyConfig

_MEGATRON, _LORA = "megatron_cfg.peft", "dtensor_cfg.lora_cfg"


def adapter_rules(config: PolicyConfig) -> list[Rule]:
    """Rules of a policy with adapters."""
    megatron = config.megatron_cfg
    peft = megatron.peft
    off = f"{_MEGATRON}.enabled=false"
    trained = (("mtp_num_layers", "0"), ("moe_router_bias_update_rate", "0"))
    return [
        *_section_rules(peft, _MEGATRON),
        *_lora_rules(config),
        *(
            Rule(
                peft.enabled and getattr(megatron, key) > 0,
                f"megatron_cfg.{key}",
                f"policy.megatron_cfg.{key} changes weights that adapters leave as they are",
                (f"megatron_cfg.{key}={none}", off),
            )
            for key, none in trained
        ),
        *(
            Rule(
                peft.enabled and peft.dropout > 0 and getattr(megatron, key) != without,
                f"{_MEGATRON}.dropout",
                f"an adapter's dropout would differ between {between}",
                (f"{_MEGATRON}.dropout=0", f"megatron_cfg.{key}={str(without).lower()}"),
            )
            for key, without, between in (
                ("tensor_model_parallel_size", 1, "tensor-parallel ranks"),
                ("activation_checkpointing", False, "a layer and what is recomputed of it"),
            )
        ),
    ]


def generating_adapter_rules(config: GeneratingPolicyConfig) -> list[Rule]:
    """Rules of a policy with adapters that is sampled from."""
    return [
        Rule(
            config.adapters.dropout > 0,
            f"{_LORA if config.dtensor_cfg.enabled else _MEGATRON}.dropout",
            "a policy with dropout has no well-defined logprobs: it cannot be trained on its own samples",
            (f"{_LORA if config.dtensor_cfg.enabled else _MEGATRON}.dropout=0",),
        )
    ]


def _lora_rules(config: PolicyConfig) -> list[Rule]:
    """Of the dtensor policy's adapters alone."""
    dtensor, lora = config.dtensor_cfg, config.dtensor_cfg.lora_cfg
    return [
        *_section_rules(lora, _LORA),
        Rule(
            lora.enabled and lora.match_all_linear and bool(lora.target_modules),
            f"{_LORA}.target_modules",
            "match_all_linear says every linear layer, and target_modules names some",
            (f"{_LORA}.target_modules=[]", f"{_LORA}.match_all_linear=false"),
        ),
        Rule(
            lora.enabled and not lora.match_all_linear and not lora.target_modules,
            f"{_LORA}.match_all_linear",
            "match_all_linear=false needs target_modules, the linear layers that have an adapter",
            (f"{_LORA}.match_all_linear=true",),
        ),
        Rule(
            lora.enabled and dtensor.tensor_parallel_size > 1,
            "dtensor_cfg.tensor_parallel_size",
            "the dtensor policy does not cut adapters over tensor-parallel ranks; the megatron policy does",
            ("dtensor_cfg.tensor_parallel_size=1", f"{_LORA}.enabled=false"),
        ),
        Rule(
            lora.enabled and lora.dropout > 0 and dtensor.activation_checkpointing,
            f"{_LORA}.dropout",
            "an adapter's dropout would differ between a layer and what is recomputed of it",
            (f"{_LORA}.dropout=0", "dtensor_cfg.activation_checkpointing=false"),
        ),
    ]


def _section_rules(section: AdapterConfig, name: str) -> list[Rule]:
    changed = {
        key: info.default
        for key, info in type(section).model_fields.items()
        if key != "enabled" and getattr(section, key) != info.default
    }
    return [
        *(
            Rule(
                not section.enabled,
                f"{name}.{key}",
                f"policy.{name}.{key} is ignored while policy.{name}.enabled is false",
                (f"{name}.enabled=true", f"{name}.{key}={'[]' if default == () else str(default).lower()}"),
            )
            for key, default in changed.items()
        ),
        Rule(
            bool(section.target_modules) and bool(section.exclude_modules),
            f"{name}.exclude_modules",
            f"policy.{name}.exclude_modules leaves out of all linear layers, and target_modules names some",
            (f"{name}.exclude_modules=[]", f"{name}.target_modules=[]"),
        ),
        Rule(
            section.dropout == 0 and section.dropout_position != "pre",
            f"{name}.dropout_position",
            f"policy.{name}.dropout_position says nothing while dropout is 0",
            (f"{name}.dropout=0.1", f"{name}.dropout_position=pre"),
        ),
    ]
