"""What autograd keeps of a policy's forward pass, counted: bytes of distinct storages, weights left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from nemotron_steps.engine.backends.policy import build_policy
from nemotron_steps.engine.policy.token_layout import build_layout
from nemotron_steps.engine.types import TrainBatch
from tests.engine.policy.batches import policy_config, rl_loss

PROMPT, ANSWER = 16, 48


def equal_rows(rows: int, group: int) -> TrainBatch:
    """Rows of one length, of which each `group` have one prompt."""
    generator = torch.Generator().manual_seed(0)
    width = PROMPT + ANSWER
    ids = torch.randint(3, 200, (rows, width), generator=generator)
    for row in range(rows):
        ids[row, :PROMPT] = ids[row - row % group, :PROMPT]
    mask = torch.zeros(rows, width)
    mask[:, PROMPT:] = 1
    return TrainBatch(
        input_ids=ids,
        lengths=torch.full((rows,), width),
        token_mask=mask,
        sample_mask=torch.ones(rows),
        generation_logprobs=-5.0 * mask,
        advantages=mask,
    )


def built(folder: Path, precision: str, megatron: dict[str, Any]) -> Any:
    """A policy."""
    config = policy_config(precision=precision, megatron_cfg=megatron)
    return build_policy(config, folder, rl_loss(), reference=False, total_steps=10)


def kept_bytes(policy: Any, rows: int, group: int) -> tuple[int, int]:
    """(bytes kept by the layers' forward pass, tokens of the micro-batch)."""
    layout = build_layout(equal_rows(rows, group), range(rows))
    weights = {tensor.untyped_storage().data_ptr() for tensor in policy.model.parameters()}
    seen: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            seen[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = policy.model(layout)
    assert hidden.requires_grad
    return sum(storage.nbytes() for storage in seen.values()), layout.token_ids.shape[0]
