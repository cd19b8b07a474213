"""What a training step leaves: the whole checkpoint in its format, or an adapter with what it has of its base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nemotron_steps.artifacts.models import Artifact
from nemotron_steps.runs.context import plain_context
from nemotron_steps.steps.trained_model import save_trained


class Policy:
    """Notes what it is asked to save."""

    def __init__(self) -> None:
        self.saved: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *given: self.saved.append((name, *given))


def test_an_adapter_names_its_base_and_has_what_belongs_to_both(tmp_path: Path) -> None:
    known = {"architecture": "Q", "model_type": "qwen3", "tokenizer": "t", "chat_template": "c", "reward": 0.5}
    inputs = {"policy": Artifact("checkpoint_hf", "digest", tmp_path, attributes=known)}
    context = plain_context(None, tmp_path, inputs=inputs, outputs={"model": "adapter"})
    slot, policy = context.outputs["model"], Policy()
    slot.attributes["rank"] = 8
    save_trained(policy, context, "base", port="policy")  # type: ignore[arg-type]
    assert policy.saved == [("save_adapter", slot.path, "base", "digest")]
    assert slot.attributes == {"rank": 8, **{name: known[name] for name in known if name != "reward"}}
