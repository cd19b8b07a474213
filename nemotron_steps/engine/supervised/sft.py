"""Supervised fine-tuning on the engine's policies: the same batches, optimizer and checkpoints as GRPO."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemotron_steps.config.schema.sft import SftConfig
from nemotron_steps.engine.checkpoints.checkpoint import CheckpointManager
from nemotron_steps.engine.reporting import Reporter
from nemotron_steps.engine.rollouts.data import read_rows
from nemotron_steps.engine.supervised.chat_data import batch_of, shuffled_batches
from nemotron_steps.engine.supervised.chat_tokens import ChatSequence, chat_sequences
from nemotron_steps.engine.supervised.packed_rows import SftExample
from nemotron_steps.engine.types import Policy
from nemotron_steps.errors import DataError, show_line
from nemotron_steps.models.chat import ChatFormat


def read_chats(path: str | Path, chat: ChatFormat, max_length: int) -> tuple[list[ChatSequence], int, int]:
    """Sequences of the chats of a JSON Lines file (chat_tokens.py), how many chats these are, and how many were left
    out for being longer than max_length tokens.

    Raises:
        DataError: a row without messages, or a file in which every chat is too long.
    """
    sequences: list[ChatSequence] = []
    chats = too_long = longest = 0
    for row in read_rows(path):
        messages = row.row.get("messages")
        if not isinstance(messages, list) or not messages:
            raise DataError(
                "the row has no messages",
                where=f"{row.where} field messages",
                expected="a list of turns",
                hints=show_line(row.where),
            )
        encoded = chat_sequences(chat, messages, row.where, row.row)
        tokens = max(len(sequence.token_ids) for sequence in encoded)
        if tokens > max_length:
            too_long += 1
            longest = max(longest, tokens)
        else:
            chats += 1
            sequences += encoded
    if not sequences:
        raise DataError(
            f"all {too_long} chats are longer than policy.max_total_sequence_length = {max_length}",
            where=str(path),
            expected=f"chats of at most {max_length} tokens",
            found=f"up to {longest}",
            hints=(f"policy.max_total_sequence_length={longest}",),
        )
    return sequences, chats, too_long


def finetune(
    policy: Policy,
    train: Sequence[SftExample],
    validation: Sequence[SftExample],
    config: SftConfig,
    checkpoints: CheckpointManager,
    reporter: Reporter,
) -> dict[str, Any]:
    """Train for sft.max_num_steps, resuming from the newest checkpoint.

    Args:
        train: `policy.train_global_batch_size` of them make a step: chats, or rows that chats were packed into.

    Returns:
        Summary: steps, training loss of the last step, validation loss before and after (nats a token).
    """
    settings = config.sft
    batch_size = config.policy.train_global_batch_size
    divisible_by = config.policy.make_sequence_length_divisible_by
    total = min(settings.max_num_steps, settings.max_num_epochs * (len(train) // batch_size))
    step = 0
    loss = loss_before = float("nan")
    latest = checkpoints.latest()
    if latest is not None:
        policy.load_checkpoint(latest.policy_path)
        step = latest.step
        state = latest.state()
        loss_before = float(state["loss_before"])
        loss = float(state["metrics"]["loss"])
        reporter.event("resumed", step=step)
    elif validation:
        loss_before = _validation_loss(policy, validation, config)
    batches = shuffled_batches(train, batch_size, epochs=settings.max_num_epochs, seed=settings.seed, skip=step)
    checkpoints.steps_begin()
    for examples in batches:
        if step >= total:
            break
        started = time.perf_counter()
        batch = batch_of(examples, divisible_by=divisible_by)
        metrics = policy.train_step(batch)
        step += 1
        loss = metrics["loss"]
        seconds = time.perf_counter() - started
        tokens = int(batch.lengths.sum())
        metrics.update({"timing/train_s": seconds, "train_tokens_per_s": tokens / seconds})
        if settings.val_period > 0 and step % settings.val_period == 0 and validation:
            metrics["validation_loss"] = _validation_loss(policy, validation, config)
        reporter.metrics(step, metrics)
        reporter.progress(f"sft  loss {loss:.3f}", step, total)
        checkpoints.check()
        if checkpoints.due(step, last=False):
            validated = ["validation_loss"] if settings.val_period > 0 and validation else []
            checkpoints.save(step, policy, {"loss_before": loss_before, "metrics": metrics}, reported=validated)
            if step < total:
                checkpoints.refuse_overtime(step, total, reporter)
    summary: dict[str, Any] = {"steps": step, "train_loss": loss}
    if validation:
        summary["validation_loss_before"] = loss_before
        summary["validation_loss"] = _validation_loss(policy, validation, config)
    return summary


def _validation_loss(policy: Policy, validation: Sequence[SftExample], config: SftConfig) -> float:
    """Mean negative log likelihood of trained tokens, in nats."""
    size = config.policy.train_global_batch_size
    total = count = 0.0
    for start in range(0, min(len(validation), size * config.sft.val_batches), size):
        batch = batch_of(validation[start : start + size], divisible_by=config.policy.make_sequence_length_divisible_by)
        logprobs = policy.logprobs(batch)
        total -= float((logprobs * batch.token_mask).sum())
        count += float(batch.token_mask.sum())
    return total / count
