"""sft/megatron_bridge: supervised fine-tuning of a Megatron checkpoint, or of a new model from scratch."""

from __future__ import annotations

from nemotron_steps.config.schema.sft import SftConfig
from nemotron_steps.runs.context import StepContext
from nemotron_steps.steps.sft.training import trained_on_chats
from nemotron_steps.steps.trained_model import save_trained


def run(context: StepContext[SftConfig]) -> None:
    """Train and write the `model` output (checkpoint_megatron, or adapter)."""
    with trained_on_chats(context, context.config) as trained:
        save_trained(trained.policy, context, context.config.policy.checkpoint, port="model")
    context.tracker.summary(trained.summary)
