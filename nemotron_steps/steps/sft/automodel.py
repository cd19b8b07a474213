"""sft/automodel: supervised fine-tuning of any Hugging Face model under FSDP2, or of a new model from scratch."""

from __future__ import annotations

from nemotron_steps.config.schema.sft import SftConfig
from nemotron_steps.errors import ConfigError
from nemotron_steps.runs.context import StepContext
from nemotron_steps.steps.sft.training import trained_on_chats
from nemotron_steps.steps.trained_model import save_trained


def run(context: StepContext[SftConfig]) -> None:
    """Train and write the `model` output (Hugging Face folder, or adapter)."""
    if not context.config.policy.dtensor_cfg.enabled:
        raise ConfigError(
            "this step trains with FSDP2",
            where="policy.dtensor_cfg.enabled",
            expected="true",
            found="false",
            hints=["policy.dtensor_cfg.enabled=true", "steps run sft/megatron_bridge"],
        )
    with trained_on_chats(context, context.config) as trained:
        save_trained(trained.policy, context, context.config.policy.checkpoint, port="model", hf=True)
    context.tracker.summary(trained.summary)
