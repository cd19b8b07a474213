"""Settings of adapters that have no meaning are refused at their key, and every hint mends what it is for."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from nemotron_steps.config.schema.rl import RlConfig
from nemotron_steps.config.schema.sft import SftConfig
from nemotron_steps.errors import ConfigError
from tests.config.test_rules import DTENSOR, composed

MEGATRON, LORA = "policy.megatron_cfg", "policy.dtensor_cfg.lora_cfg"
PEFT = f"{MEGATRON}.peft"
ON = {f"{PEFT}.enabled": True}
OF_DTENSOR = {**DTENSOR, f"{LORA}.enabled": True}

BROKEN: list[tuple[Any, dict[str, Any], str]] = [
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


@pytest.mark.parametrize(("schema", "broken", "key"), BROKEN, ids=str)
def test_what_would_be_ignored_or_is_not_built_is_refused(schema: Any, broken: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        composed(broken).model(schema)
    error = caught.value
    assert not error.problems and error.where == f"override '{key}'" and error.hints
    for hint in error.hints:
        pasted = {name: yaml.safe_load(value) for name, value in (part.split("=") for part in hint.split(" "))}
        try:
            composed({**broken, **pasted}).model(schema)
        except ConfigError as another:
            assert error.what not in str(another), hint
