"""What a training step leaves: the whole checkpoint in its format, or an adapter with what it has of its base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.artifacts.models import Artifact
from nemotron_steps.runs.context import plain_context
from nemotron_steps.steps.trained_model import save_trained


class Policy:
    """Notes what it is asked to save."""

    def __init__(self) -> None:
        self.saved: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *given: self.saved.append((name, *given))


@pytest.mark.parametrize(("hf", "saved"), [(False, "save_model"), (True, "save_hf")])
def test_a_whole_checkpoint_is_saved_in_the_format_of_its_step(tmp_path: Path, hf: bool, saved: str) -> None:
    context = plain_context(None, tmp_path, outputs={"model": "checkpoint_hf"})
    policy: Any = Policy()
    save_trained(policy, context, "base", port="model", hf=hf)
    slot = context.outputs["model"]
    assert policy.saved == [(saved, slot.path)] and slot.attributes == {}


def test_an_adapter_names_its_base_and_has_what_belongs_to_both(tmp_path: Path) -> None:
    known = {"architecture": "Q", "model_type": "qwen3", "tokenizer": "t", "chat_template": "c", "reward": 0.5}
    inputs = {"policy": Artifact("checkpoint_hf", "digest", tmp_path, attributes=known)}
    context = plain_context(None, tmp_path, inputs=inputs, outputs={"model": "adapter"})
    slot, policy = context.outputs["model"], Policy()
    slot.attributes["rank"] = 8
    save_trained(policy, context, "base", port="policy")  # type: ignore[arg-type]
    assert policy.saved == [("save_adapter", slot.path, "base", "digest")]
    assert slot.attributes == {"rank": 8, **{name: known[name] for name in known if name != "reward"}}


def test_an_adapter_of_a_checkpoint_that_is_no_input_has_its_path_alone(tmp_path: Path) -> None:
    context = plain_context(None, tmp_path, outputs={"model": "adapter"})
    slot, policy = context.outputs["model"], Policy()
    save_trained(policy, context, "base", port="policy", hf=True)  # type: ignore[arg-type]
    assert policy.saved == [("save_adapter", slot.path, "base", "")] and slot.attributes == {}
