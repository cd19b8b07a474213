"""`convert/hf_to_megatron`: a Hugging Face checkpoint → a Megatron one; tokenizer and chat template travel along."""

from __future__ import annotations

from nemotron_steps.config.schema.convert import ConvertConfig
from nemotron_steps.models.architecture import Architecture
from nemotron_steps.models.megatron_checkpoint import convert_hf_to_megatron
from nemotron_steps.runs.context import StepContext


def run(context: StepContext[ConvertConfig]) -> None:
    """Convert the one input into the one output, bit for bit unless a precision is asked for."""
    (source,) = context.inputs.values()
    (target,) = context.outputs.values()
    convert_hf_to_megatron(source.path, target.path, context.config.precision)
    context.tracker.summary({"layers": Architecture.from_folder(target.path).num_layers})
