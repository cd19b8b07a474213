"""Padded batches of chats, and the order in which they are trained."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TypeVar

import numpy as np
import torch

from nemotron_steps.engine.supervised.chat_tokens import ChatSequence
from nemotron_steps.engine.supervised.packed_rows import PackedRow, SftExample
from nemotron_steps.engine.types import TrainBatch
from nemotron_steps.errors import DataError

Example = TypeVar("Example")


def batch_of(examples: Sequence[SftExample], pad_id: int = 0, divisible_by: int = 1) -> TrainBatch:
    """Chats as one right-padded TrainBatch with unit advantages, a row each; those of a packed row keep its number.

    Args:
        divisible_by: T is rounded up to a multiple of this.
    """
    sequences: list[ChatSequence] = []
    numbers: list[int] = []
    for number, example in enumerate(examples):
        chats = example.chats if isinstance(example, PackedRow) else (example,)
        sequences += chats
        numbers += [number] * len(chats)
    longest = max(len(s.token_ids) for s in sequences)
    longest = -(-longest // divisible_by) * divisible_by
    lengths = np.array([len(s.token_ids) for s in sequences])
    there = np.arange(longest) < lengths[:, None]
    input_ids = np.full(there.shape, pad_id, dtype=np.int64)
    token_mask = np.zeros(there.shape, dtype=np.float32)
    input_ids[there] = list(chain.from_iterable(s.token_ids for s in sequences))
    token_mask[there] = list(chain.from_iterable(s.token_mask for s in sequences))
    return TrainBatch(
        input_ids=torch.from_numpy(input_ids),
        lengths=torch.from_numpy(lengths),
        token_mask=torch.from_numpy(token_mask),
        sample_mask=torch.ones(len(sequences)),
        generation_logprobs=torch.zeros(len(sequences), longest),
        advantages=torch.ones(len(sequences), longest),
        packed_row=torch.tensor(numbers) if isinstance(examples[0], PackedRow) else None,
    )


def shuffled_batches(
    sequences: Sequence[Example], batch_size: int, *, epochs: int, seed: int, skip: int = 0
) -> Iterator[list[Example]]:
    """Full batches, epoch after epoch, in an order drawn from (seed, epoch); the first `skip` batches are passed over
    without being made, which is how a resumed run finds its place."""
    per_epoch = len(sequences) // batch_size
    if per_epoch == 0:
        raise DataError(
            f"{len(sequences)} examples are fewer than one batch",
            expected=f"at least policy.train_global_batch_size = {batch_size}",
            hints=[f"policy.train_global_batch_size={len(sequences)}"],
        )
    for epoch in range(skip // per_epoch, epochs):
        order = list(range(len(sequences)))
        random.Random(f"{seed}:{epoch}").shuffle(order)
        start = skip % per_epoch if epoch == skip // per_epoch else 0
        for index in range(start, per_epoch):
            yield [sequences[i] for i in order[index * batch_size : (index + 1) * batch_size]]
