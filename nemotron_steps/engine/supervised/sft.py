"""Supervised fine-tuning on the engine's policies: the same batches, optimizer and checkpoints as GRPO."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemotron_steps.config.schema.sft import SftConfig
from nemotron_steps.engine.checkpoints import CheckpointManager
from nemotron_steps.engine.reporting import Reporter
from nemotron_steps.engine.rollouts.data import read_rows
from nemotron_steps.engine.supervised.chat_tokens import ChatSequence, SftExample, chat_sequences, none_fits
from nemotron_steps.engine.supervised.loop import batch_of, train_on_examples
from nemotron_steps.engine.types import Policy
from nemotron_steps.models.chat import ChatFormat
from nemotron_steps.rows.layouts import read_chat


def read_chats(path: str | Path, chat: ChatFormat, max_length: int) -> tuple[list[ChatSequence], int, int]:
    """Sequences of a file's chats, how many chats these are, and how many were too long."""
    sequences: list[ChatSequence] = []
    chats = too_long = longest = 0
    for row in read_rows(path):
        read = read_chat(row.row, row.where)
        encoded = chat_sequences(chat, read.messages, row.where, read.beside)
        tokens = max(len(sequence.token_ids) for sequence in encoded)
        if tokens > max_length:
            too_long += 1
            longest = max(longest, tokens)
        else:
            chats += 1
            sequences += encoded
    if not sequences:
        raise none_fits("chats", too_long, path, max_length, longest)
    return sequences, chats, too_long


def finetune(
    policy: Policy,
    train: Sequence[SftExample],
    validation: Sequence[SftExample],
    config: SftConfig,
    checkpoints: CheckpointManager,
    reporter: Reporter,
) -> dict[str, Any]:
    """Train for sft.max_num_steps, resuming from the newest checkpoint."""

    def update(examples: Sequence[SftExample]) -> dict[str, float]:
        started = time.perf_counter()
        batch = batch_of(examples, divisible_by=config.policy.make_sequence_length_divisible_by)
        metrics = policy.train_step(batch)
        seconds = time.perf_counter() - started
        return metrics | {"timing/train_s": seconds, "train_tokens_per_s": int(batch.lengths.sum()) / seconds}

    def validate() -> dict[str, float]:
        """Mean negative log likelihood of trained tokens, in nats."""
        size, multiple = config.policy.train_global_batch_size, config.policy.make_sequence_length_divisible_by
        total = count = 0.0
        for start in range(0, min(len(validation), size * config.sft.val_batches), size):
            batch = batch_of(validation[start : start + size], divisible_by=multiple)
            total -= float((policy.logprobs(batch) * batch.token_mask).sum())
            count += float(batch.token_mask.sum())
        return {"validation_loss": total / count}

    return train_on_examples(
        policy,
        train,
        config.sft,
        config.policy.train_global_batch_size,
        update=update,
        validate=validate if validation else None,
        followed={"loss": ".3f"},
        checkpoints=checkpoints,
        reporter=reporter,
    )
