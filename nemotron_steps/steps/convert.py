"""The conversion steps: one checkpoint format to another. The resolver inserts them between a checkpoint and a port."""

from nemotron_steps.config.families import pattern_of
from nemotron_steps.config.schema.convert import ConvertConfig, MergeConfig
from nemotron_steps.models import adapters
from nemotron_steps.models.architecture import Architecture, read_config
from nemotron_steps.models.megatron_checkpoint import convert_hf_to_megatron, convert_megatron_to_hf
from nemotron_steps.runs.context import StepContext


def hf_to_megatron(context: StepContext[ConvertConfig]) -> None:
    """A Hugging Face checkpoint → a Megatron one with its tokenizer, bit for bit unless a precision is asked for."""
    (source,), (target,) = context.inputs.values(), context.outputs.values()
    convert_hf_to_megatron(source.path, target.path, context.config.precision)
    context.tracker.summary({"layers": Architecture.from_folder(target.path).num_layers})


def megatron_to_hf(context: StepContext[ConvertConfig]) -> None:
    """A Megatron checkpoint → a Hugging Face one that plain transformers loads, bit for bit likewise."""
    (source,), (target,) = context.inputs.values(), context.outputs.values()
    convert_megatron_to_hf(source.path, target.path, context.config.precision)
    context.tracker.summary({"layers": Architecture.from_folder(target.path).num_layers})


def merge_adapter(context: StepContext[MergeConfig]) -> None:
    """A low-rank adapter and the checkpoint that it was trained on → a Hugging Face checkpoint."""
    target = context.outputs["model"].path
    adapters.merge_adapter(context.inputs["adapter"].path, context.config.base, target)
    config = read_config(target / "config.json")  # of any family: adapters of all that PEFT trains are merged
    context.tracker.summary({"layers": len(pattern_of(config)) or config.get("num_hidden_layers")})
