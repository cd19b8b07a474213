"""`convert/merge_adapter`: a low-rank adapter and the checkpoint that it was trained on → a Hugging Face checkpoint."""

from __future__ import annotations

from nemotron_steps.config.families import pattern_of
from nemotron_steps.config.schema.convert import MergeConfig
from nemotron_steps.models.adapters import merge_adapter
from nemotron_steps.models.architecture import read_config
from nemotron_steps.runs.context import StepContext


def run(context: StepContext[MergeConfig]) -> None:
    """Add the `adapter` to its base and write the `model` output."""
    target = context.outputs["model"].path
    merge_adapter(context.inputs["adapter"].path, context.config.base, target)
    config = read_config(target / "config.json")  # of any family: adapters of all that PEFT trains are merged
    context.tracker.summary({"layers": len(pattern_of(config)) or config.get("num_hidden_layers")})
