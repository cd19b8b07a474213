"""Rows into batches: padding rollouts, selecting rows, and cutting micro-batches by count or by token budget.

A *unit* is a number of consecutive rows that a loss reads together: 1 for GRPO, 2 for the pairs of DPO.
"""

from collections.abc import Iterable, Sequence
from dataclasses import fields
from itertools import chain

import numpy as np
import torch

from nemotron_steps.engine.types import Rollout, TrainBatch
from nemotron_steps.errors import ConfigError, EngineError


def round_up(length: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `length`."""
    return -(-length // multiple) * multiple


def pad_rows(
    rollouts: Sequence[Rollout], sample_mask: torch.Tensor, *, pad_token_id: int = 0, length_multiple: int = 1
) -> TrainBatch:
    """Rollouts as a right-padded batch with advantages 0; its width is the longest row, rounded up."""
    for rollout in rollouts:
        size = len(rollout.token_ids)
        assert size > 0 and len(rollout.token_mask) == len(rollout.logprobs) == size, "not token-aligned"
    width = round_up(max(len(r.token_ids) for r in rollouts), length_multiple)
    shape = (len(rollouts), width)
    batch = TrainBatch(
        input_ids=torch.full(shape, pad_token_id, dtype=torch.int64),
        lengths=torch.tensor([len(r.token_ids) for r in rollouts], dtype=torch.int64),
        token_mask=torch.zeros(shape),
        sample_mask=sample_mask.float(),
        generation_logprobs=torch.zeros(shape),
        advantages=torch.zeros(shape),
    )
    recorded = [(row, r.routed_experts) for row, r in enumerate(rollouts) if r.routed_experts is not None]
    if recorded:
        batch.routed_experts = torch.full((*shape, *recorded[0][1].shape[1:]), -1, dtype=torch.int16)
        for row, chosen in recorded:
            batch.routed_experts.numpy()[row, : len(chosen)] = chosen
    # One conversion and one scatter a column: row by row, this took longer than the forward pass of a small model.
    inside = torch.arange(width) < batch.lengths.unsqueeze(-1)
    batch.input_ids.masked_scatter_(inside, _flat((r.token_ids for r in rollouts), np.int64))
    batch.token_mask.masked_scatter_(inside, _flat((r.token_mask for r in rollouts), np.float32))
    batch.generation_logprobs.masked_scatter_(inside, _flat((r.logprobs for r in rollouts), np.float32))
    assert not bool(batch.token_mask[:, 0].any()), "a rollout trains its first token, which nothing predicts"
    return batch


def _flat(columns: Iterable[Sequence[float]], dtype: type[np.generic]) -> torch.Tensor:
    """All rows' values, one after the other."""
    return torch.from_numpy(np.fromiter(chain.from_iterable(columns), dtype=dtype))


def select_rows(batch: TrainBatch, rows: Sequence[int], *, width: int | None = None) -> TrainBatch:
    """The given rows, in that order, narrowed to `width` columns (None keeps all)."""
    index = torch.as_tensor(rows, dtype=torch.long)
    if width is not None and len(index) and int(batch.lengths[index].max()) > width:
        raise EngineError("selecting rows would cut a sequence")
    selected = {}
    for field in fields(TrainBatch):
        value = getattr(batch, field.name)
        if value is not None:
            value = value[index]
            if width is not None and value.dim() > 1:
                value = value[:, :width]
        selected[field.name] = value
    return TrainBatch(**selected)


def fixed_micro_batches(rows: int, size: int, *, unit: int = 1) -> list[list[int]]:
    """Row indices of consecutive micro-batches of `size`, at least one unit; the last may be smaller."""
    check_units(rows, unit)
    size = max(size // unit, 1) * unit
    return [list(range(start, min(start + size, rows))) for start in range(0, rows, size)]


def check_units(rows: int, unit: int) -> None:
    """Raise EngineError unless `rows` are whole units."""
    if rows % unit:
        raise EngineError(f"{rows} rows are not whole units of {unit}", where="engine/batching.py")


def token_budget_micro_batches(
    lengths: Sequence[int],
    budget: int,
    *,
    length_multiple: int = 1,
    unit: int = 1,
    key: str = "policy.dynamic_batching.train_mb_tokens",
) -> list[list[int]]:
    """Dynamic batching: row indices of micro-batches whose padded size, rows x longest row, is within `budget` tokens.

    Rows are sorted by length, so that neighbours waste little padding, then cut greedily. Deterministic. `key` is the
    budget's; ConfigError where one unit alone exceeds it.
    """
    check_units(len(lengths), unit)
    longest = [max(lengths[start : start + unit]) for start in range(0, len(lengths), unit)]
    order = sorted(range(len(longest)), key=lambda number: (-longest[number], number))
    batches: list[list[int]] = []
    width = 0
    for number in order:
        size = round_up(longest[number], length_multiple)
        if size * unit > budget:
            raise ConfigError(
                f"a sequence of {longest[number]} tokens does not fit into the micro-batch budget",
                where=key,
                expected=f"at least {size * unit} tokens",
                found=f"{budget}",
                hints=(f"{key}={size * unit}",),
            )
        # Sorted longest first, so the first unit of a micro-batch sets its width.
        if not batches or width * unit * (len(batches[-1]) + 1) > budget:
            batches.append([])
            width = size
        batches[-1].append(number)
    return [[row for number in batch for row in range(number * unit, (number + 1) * unit)] for batch in batches]
