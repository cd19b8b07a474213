"""sft/megatron_bridge: supervised fine-tuning of a Megatron checkpoint, or of a new model from scratch."""

from __future__ import annotations

from nemotron_steps.config.schema.sft import SftConfig
from nemotron_steps.runs.context import StepContext
from nemotron_steps.steps.sft.training import trained_on_chats


def run(context: StepContext[SftConfig]) -> None:
    """Train and write the `model` output (checkpoint_megatron)."""
    with trained_on_chats(context, context.config) as trained:
        trained.policy.save_model(context.outputs["model"].path)
    context.tracker.summary(trained.summary)
