"""`convert/megatron_to_hf`: a Megatron checkpoint → a Hugging Face one that plain transformers loads."""

from __future__ import annotations

from nemotron_steps.config.schema.convert import ConvertConfig
from nemotron_steps.models.architecture import Architecture
from nemotron_steps.models.megatron_checkpoint import convert_megatron_to_hf
from nemotron_steps.runs.context import StepContext


def run(context: StepContext[ConvertConfig]) -> None:
    """Convert the one input into the one output, bit for bit unless a precision is asked for."""
    (source,) = context.inputs.values()
    (target,) = context.outputs.values()
    convert_megatron_to_hf(source.path, target.path, context.config.precision)
    context.tracker.summary({"layers": Architecture.from_folder(target.path).num_layers})
