"""What the supervised steps refuse before any step of a run starts."""

from __future__ import annotations

from collections.abc import Mapping

from nemotron_steps.artifacts.models import Artifact
from nemotron_steps.config.schema.sft import GenRmConfig, SftConfig
from nemotron_steps.errors import ConfigError
from nemotron_steps.steps import placement


def check(config: SftConfig | GenRmConfig, inputs: Mapping[str, Artifact | None]) -> None:
    """Refuse a config without a model, or whose ranks need Ray. Chats are looked at when their artifact is opened.

    See StepTable.preflight.
    """
    if config.policy.checkpoint is None and config.from_scratch is None and "model" not in inputs:
        raise nothing_to_train()
    if config.policy.adapters.enabled and config.policy.checkpoint is None and "model" not in inputs:
        raise ConfigError(
            "an adapter belongs to a checkpoint, and this step would start a new model",
            where="policy.megatron_cfg.peft.enabled",
            expected="a checkpoint at policy.checkpoint",
            found="from_scratch",
            hints=["--input model=PATH", "policy.megatron_cfg.peft.enabled=false"],
        )
    placement.check(config, inputs)


def nothing_to_train() -> ConfigError:
    """Neither a checkpoint nor the shape of a new model."""
    return ConfigError(
        "nothing to train: neither a checkpoint nor a shape for a new model",
        where="policy.checkpoint",
        expected="policy.checkpoint or from_scratch.*",
        hints=["--input model=PATH", "+from_scratch.hidden_size=128"],
    )
