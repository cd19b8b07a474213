"""What a training step leaves: a whole checkpoint, or the adapter alone where adapters were trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nemotron_steps.runs.context import StepContext

if TYPE_CHECKING:
    from nemotron_steps.engine.types import Policy

ADAPTER = "adapter"
_OF_THE_BASE = ("architecture", "model_type", "tokenizer", "chat_template")


def save_trained(
    policy: Policy, context: StepContext[Any], checkpoint: str | None, *, port: str, hf: bool = False
) -> None:
    """Write the `model` output."""
    slot = context.outputs["model"]
    if slot.type != ADAPTER:
        (policy.save_hf if hf else policy.save_model)(slot.path)
        return
    assert checkpoint is not None, "an adapter belongs to a checkpoint"
    base = context.inputs.get(port)
    policy.save_adapter(slot.path, checkpoint, base.digest if base is not None else "")
    known = base.attributes if base is not None else {}
    slot.attributes.update({name: known[name] for name in _OF_THE_BASE if name in known})
