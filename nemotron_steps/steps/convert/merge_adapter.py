"""`convert/merge_adapter`: a low-rank adapter and the checkpoint that it was trained on → a Hugging Face checkpoint."""

from __future__ import annotations

from nemotron_steps.config.schema.convert import MergeConfig
from nemotron_steps.models.adapter_folder import merge_adapter
from nemotron_steps.models.architecture import Architecture
from nemotron_steps.runs.context import StepContext


def run(context: StepContext[MergeConfig]) -> None:
    """Add the `adapter` to its base and write the `model` output."""
    target = context.outputs["model"].path
    merge_adapter(context.inputs["adapter"].path, context.config.base, target)
    context.tracker.summary({"layers": Architecture.from_folder(target).num_layers})
