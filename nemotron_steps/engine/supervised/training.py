"""Training without rollouts on the engine's policies: batches, the loop, and the two methods, SFT and DPO.

Of DPO only answers are trained, never the prompt. Rows 2k and 2k + 1 of a batch are the chosen and the rejected answer
of a pair, which the policy keeps in one micro-batch, packed or not.
"""

import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from nemotron_steps.config.schema.dpo import DpoConfig, DpoTrainConfig
from nemotron_steps.config.schema.sft import SftConfig, SftTrainConfig
from nemotron_steps.engine.checkpoints import CheckpointManager
from nemotron_steps.engine.losses.loss import count_normalizers, finalize_metrics
from nemotron_steps.engine.losses.supervised import DpoLoss
from nemotron_steps.engine.reporting import Reporter, first_and_last
from nemotron_steps.engine.rollouts.data import read_rows
from nemotron_steps.engine.supervised.chat_tokens import ChatSequence, PackedRow, SftExample, chat_sequences, none_fits
from nemotron_steps.engine.types import Policy, TrainBatch
from nemotron_steps.errors import DataError, show_line
from nemotron_steps.models.chat import ChatFormat
from nemotron_steps.rows.layouts import read_chat, read_pair
from nemotron_steps.rows.messages import wrong

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


@dataclass(frozen=True)
class PreferencePair:
    """Two answers to one prompt, tokenised with it."""

    chosen: ChatSequence
    rejected: ChatSequence

    @property
    def longest(self) -> int:
        """Tokens of the longer one."""
        return max(len(self.chosen.token_ids), len(self.rejected.token_ids))


def read_pairs(path: str | Path, chat: ChatFormat, max_length: int) -> tuple[list[PreferencePair], int]:
    """Encoded pairs of a JSON Lines file, and how many were left out for being longer than max_length tokens."""
    pairs: list[PreferencePair] = []
    too_long = longest = 0
    for row in read_rows(path):
        pair = encode_pair(chat, row.row, row.where)
        if pair.longest > max_length:
            too_long += 1
            longest = max(longest, pair.longest)
        else:
            pairs.append(pair)
    if not pairs:
        raise none_fits("pairs", too_long, path, max_length, longest)
    return pairs, too_long


def encode_pair(chat: ChatFormat, row: Mapping[str, Any], where: str) -> PreferencePair:
    """Tokens of a row with two answers to one prompt (rows/layouts.py); only the answers are trained."""
    pair = read_pair(dict(row), where)
    asked = [{**message, "weight": 0} for message in pair.prompt.messages]
    if asked and asked[-1]["role"] == "assistant":
        expected = "its text at the beginning of `chosen` and `rejected`"
        raise wrong("must not end with an assistant message", where, "prompt", expected=expected)
    sides = []
    for answer in (pair.chosen, pair.rejected):
        sequences = chat_sequences(chat, [*asked, *({**m, "weight": 1} for m in answer)], where, pair.prompt.beside)
        if len(sequences) > 1:
            raise DataError(
                "the chat template rewrites a turn of the answer when the next one follows",
                where=where,
                expected="turns that stay as they are, or an answer of one turn after a prompt with the others",
                found=f"an answer shown in {len(sequences)} parts",
                hints=show_line(where),
            )
        sides += sequences
    if sides[0].token_ids == sides[1].token_ids:
        raise DataError("the chosen and the rejected answer have the same tokens", where=where, hints=show_line(where))
    return PreferencePair(*sides)


def pair_batch(pairs: Sequence[PreferencePair], *, divisible_by: int = 1) -> TrainBatch:
    """Pairs as rows 2k (chosen) and 2k + 1 (rejected) of one right-padded batch."""
    return batch_of(list(chain.from_iterable((p.chosen, p.rejected) for p in pairs)), divisible_by=divisible_by)


def optimize_preferences(
    policy: Policy,
    train: Sequence[PreferencePair],
    validation: Sequence[PreferencePair],
    config: DpoConfig,
    checkpoints: CheckpointManager,
    reporter: Reporter,
) -> dict[str, Any]:
    """Train for dpo.max_num_steps, resuming from the newest checkpoint."""

    def update(pairs: Sequence[PreferencePair]) -> dict[str, float]:
        started = time.perf_counter()
        batch = pair_batch(pairs, divisible_by=config.policy.make_sequence_length_divisible_by)
        batch.reference_logprobs = policy.reference_logprobs(batch)
        reference_s = time.perf_counter() - started
        metrics = policy.train_step(batch)
        seconds = time.perf_counter() - started
        timing = {"timing/reference_logprobs_s": reference_s, "timing/train_s": seconds - reference_s}
        return metrics | timing | {"train_tokens_per_s": float(batch.lengths.sum()) / seconds}

    return train_on_examples(
        policy,
        train,
        config.dpo,
        config.policy.train_global_batch_size,
        update=update,
        validate=(lambda: validate_pairs(policy, validation, config)) if validation else None,
        followed={"loss": ".3f", "accuracy": ".0%"},
        checkpoints=checkpoints,
        reporter=reporter,
    )


def validate_pairs(policy: Policy, pairs: Sequence[PreferencePair], config: DpoConfig) -> dict[str, float]:
    """`validation/` loss, accuracy and rewards_margin over at most dpo.val_batches batches of pairs, no gradient."""
    loss_fn = DpoLoss(config.dpo)
    size = config.policy.train_global_batch_size
    chosen = list(pairs)[: size * config.dpo.val_batches]
    totals: dict[str, float] = {}
    for start in range(0, len(chosen), size):
        part = chosen[start : start + size]
        batch = pair_batch(part, divisible_by=config.policy.make_sequence_length_divisible_by)
        batch.reference_logprobs = policy.reference_logprobs(batch)
        normalizers = count_normalizers(batch)
        _, sums = loss_fn(policy.logprobs(batch), batch, normalizers)
        metrics = finalize_metrics(sums, normalizers)
        for name in ("loss", "accuracy", "rewards_margin"):
            key = f"validation/{name}"
            totals[key] = totals.get(key, 0.0) + metrics[name] * len(part) / len(chosen)
    return totals
