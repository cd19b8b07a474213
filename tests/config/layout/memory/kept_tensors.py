"""What autograd keeps of a policy's forward pass, counted: bytes of distinct storages, weights left out."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nemotron_steps.engine.policy.token_layout import build_layout
from nemotron_steps.engine.setup.backends import build_policy
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


def built(folder: Path, precision: str, megatron: dict[str, Any], **changes: Any) -> Any:
    """A policy."""
    config = policy_config(precision=precision, megatron_cfg=megatron, **changes)
    return build_policy(config, folder, rl_loss(), reference=False, total_steps=10)


def kept_bytes(policy: Any, rows: int, group: int) -> tuple[int, int]:
    """(bytes kept by the layers' forward pass, tokens of the micro-batch)."""
    layout = build_layout(equal_rows(rows, group), range(rows))
    weights = {tensor.untyped_storage().data_ptr() for tensor in policy.model.parameters()}
    kept, hidden = _kept(lambda: policy.model(layout), lambda tensor: tensor.untyped_storage().data_ptr() in weights)
    assert hidden.requires_grad
    return kept, layout.token_ids.shape[0]


def kept_ahead_bytes(policy: Any, rows: int, depths: int) -> tuple[int, int]:
    """(bytes kept by multi-token prediction, the model's own last states among them, tokens of the micro-batch)."""
    layout = build_layout(equal_rows(rows, 1), range(rows), ahead=depths)
    weights = {tensor.untyped_storage().data_ptr() for tensor in policy.model.parameters()}
    hidden = policy.model(layout)

    def run() -> Any:
        return list(policy.model.predict_ahead(hidden, layout))

    kept, _ = _kept(run, lambda tensor: tensor.untyped_storage().data_ptr() in weights)
    return kept, layout.token_ids.shape[0]


def kept_by_transformers(policy: Any, rows: int) -> int:
    """Bytes kept by a forward pass of a dtensor policy over rows without padding; gathered weights left out."""
    shapes = {tuple(parameter.shape) for parameter in policy.model.parameters()}
    ids, none = equal_rows(rows, 1).input_ids, torch.arange(1)
    shapes |= {shape[::-1] for shape in shapes}
    kept, _ = _kept(lambda: policy.model(ids, none, none), lambda tensor: tuple(tensor.shape) in shapes)
    return kept


def _kept(run: Callable[[], Any], left_out: Callable[[torch.Tensor], bool]) -> tuple[int, Any]:
    seen: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not left_out(tensor):
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    return sum(storage.nbytes() for storage in seen.values()), result
