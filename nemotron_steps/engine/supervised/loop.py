"""The loop of SFT and DPO: shuffled batches, validation, checkpoints, and what the training came to."""

import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import torch

from nemotron_steps.config.schema.dpo import DpoTrainConfig
from nemotron_steps.config.schema.sft import SftTrainConfig
from nemotron_steps.engine.checkpoints import CheckpointManager
from nemotron_steps.engine.reporting import Reporter, first_and_last
from nemotron_steps.engine.supervised.chat_tokens import ChatSequence, PackedRow, SftExample
from nemotron_steps.engine.types import Policy, TrainBatch
from nemotron_steps.errors import DataError

Example = TypeVar("Example")


def batch_of(examples: Sequence[SftExample], pad_id: int = 0, divisible_by: int = 1) -> TrainBatch:
    """Chats as one right-padded TrainBatch with unit advantages, a row each; those of a packed row keep its number."""
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
    """Full batches, epoch after epoch, in an order drawn from (seed, epoch), without the first `skip`."""
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


logger = logging.getLogger(__name__)


def total_steps(settings: SftTrainConfig | DpoTrainConfig, batch_size: int, examples: int) -> int:
    """Optimizer steps that so many training examples give."""
    return min(settings.max_num_steps, settings.max_num_epochs * (examples // batch_size))


def train_on_examples(
    policy: Policy,
    train: Sequence[Example],
    settings: SftTrainConfig | DpoTrainConfig,
    batch_size: int,
    *,
    update: Callable[[Sequence[Example]], dict[str, float]],
    validate: Callable[[], dict[str, float]] | None,
    followed: Mapping[str, str],
    checkpoints: CheckpointManager,
    reporter: Reporter,
) -> dict[str, Any]:
    """Train to the last step, resuming from the newest checkpoint."""
    if validate is None and settings.val_period > 0:
        logger.warning(
            "val_period=%d validates nothing: the data has no validation split (data.validation.data_path is null)",
            settings.val_period,
        )
    total = total_steps(settings, batch_size, len(train))
    step = 0
    before: dict[str, float] = {}
    metrics: dict[str, float] = {}
    history: dict[str, list[float]] = {name: [] for name in followed}
    latest = checkpoints.latest()
    if latest is not None:
        policy.load_checkpoint(latest.policy_path)
        state = latest.state()
        step, before, metrics = latest.step, state.get("validation_before", {}), state["metrics"]
        history = state.get("history", history)  # a checkpoint of 0.1.0 has none
        reporter.event("resumed", step=step)
    elif validate is not None:
        before = validate()
    if before:
        reporter.metrics(0, before)
    batches = shuffled_batches(train, batch_size, epochs=settings.max_num_epochs, seed=settings.seed, skip=step)
    checkpoints.steps_begin()
    for examples in batches:
        if step >= total:
            break
        metrics = update(examples)
        step += 1
        periodic = settings.val_period > 0 and step % settings.val_period == 0
        if validate is not None and (periodic or step == total):
            metrics.update(validate())
        for name, values in history.items():
            values.append(metrics[name])
        reporter.metrics(step, metrics)
        shown = (f"{name} {metrics[name]:{form}}" for name, form in followed.items())
        reporter.progress("  ".join(shown), step, total)
        checkpoints.check()
        if checkpoints.due(step, last=False):
            state = {"validation_before": before, "history": history, "metrics": metrics}
            checkpoints.save(step, policy, state, reported=list(before) if settings.val_period > 0 else [])
            if step < total:
                checkpoints.refuse_overtime(step, total, reporter)
    summary: dict[str, Any] = {"steps": step}
    for name, values in history.items():
        summary.update(first_and_last(f"train_{name}", values))
    for name, value in before.items():
        summary[name.replace("/", "_")] = {"before": value, "after": metrics[name]}
    return summary
