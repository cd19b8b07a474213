"""Direct preference optimisation on the engine's policies: pairs, batches, the loop.

    pairs = read_pairs(file)                              chosen and rejected answer to one prompt
    for each batch of pairs:
        batch = pair_batch(pairs)                         rows 2k, 2k + 1
        batch.reference_logprobs = policy.reference...    the weights it started from
        policy.train_step(batch)                          losses/dpo.py

Only answers are trained, never the prompt. The policy keeps both rows of a pair in one micro-batch, packed or not.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from nemotron_steps.config.schema.dpo import DpoConfig
from nemotron_steps.engine.checkpoints.checkpoint import CheckpointManager
from nemotron_steps.engine.losses.dpo import DpoLoss
from nemotron_steps.engine.losses.metrics import finalize_metrics
from nemotron_steps.engine.losses.reduction import count_normalizers
from nemotron_steps.engine.reporting import Reporter
from nemotron_steps.engine.rollouts.data import read_rows
from nemotron_steps.engine.supervised.chat_data import batch_of, shuffled_batches
from nemotron_steps.engine.supervised.chat_tokens import ChatSequence, encode_chat
from nemotron_steps.engine.types import Policy, TrainBatch
from nemotron_steps.errors import DataError, show_line
from nemotron_steps.models.chat import ChatFormat


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
    """Encoded pairs of a JSON Lines file, and how many were left out for being longer than max_length tokens.

    Raises:
        DataError: a row without prompt, chosen and rejected, or a file in which every pair is too long.
    """
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
        raise DataError(
            f"all {too_long} pairs are longer than policy.max_total_sequence_length = {max_length}",
            where=str(path),
            expected=f"answers that end within {max_length} tokens, prompt included",
            found=f"up to {longest}",
            hints=(f"policy.max_total_sequence_length={longest}",),
        )
    return pairs, too_long


def encode_pair(chat: ChatFormat, row: Mapping[str, Any], where: str) -> PreferencePair:
    """Tokens of one `{"prompt", "chosen", "rejected"}` row; only the answers are trained.

    `prompt` is a text or a list of messages (`context` is read as well); an answer is a text, a message, or a list of
    messages, which may repeat the prompt's. `tools` are rendered into both.

    Raises:
        DataError: a field is missing, or both answers have the same tokens.
    """
    prompt = row.get("prompt", row.get("context"))
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not isinstance(turns, list) or not turns or prompt == "":
        raise DataError(
            "the row has no prompt",
            where=f"{where} field prompt",
            expected="a text or a list of messages",
            hints=show_line(where),
        )
    sides = []
    for side in ("chosen", "rejected"):
        answer = _answer_messages(row.get(side), turns)
        if not answer:
            raise DataError(
                f"the row has no {side} answer",
                where=f"{where} field {side}",
                expected="a text, a message or messages",
                hints=show_line(where),
            )
        sequence = encode_chat(chat, [*turns, *answer], where, row)
        spoken = sum(message.get("role") == "assistant" for message in answer)
        sides.append(ChatSequence(sequence.token_ids, _last_turns(sequence.token_mask, spoken, where)))
    if sides[0].token_ids == sides[1].token_ids:
        raise DataError("the chosen and the rejected answer have the same tokens", where=where, hints=show_line(where))
    return PreferencePair(*sides)


def _answer_messages(answer: object, prompt: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    if isinstance(answer, str):
        return [{"role": "assistant", "content": answer}] if answer else []
    if isinstance(answer, Mapping):
        return [answer]
    if not isinstance(answer, list):
        return []
    return answer[len(prompt) :] if answer[: len(prompt)] == list(prompt) else answer


def _last_turns(token_mask: Sequence[int], turns: int, where: str) -> list[int]:
    """The mask with only its last `turns` runs of ones: earlier assistant turns belong to the prompt. DataError where
    the template does not show so many turns together."""
    starts = [t for t in range(len(token_mask)) if token_mask[t] and (t == 0 or not token_mask[t - 1])]
    if turns > len(starts):
        raise DataError(
            "the chat template rewrites a turn of the answer when the next one follows",
            where=where,
            expected=f"{turns} turns that stay as they are, or an answer of one turn after a prompt with the others",
            found=f"{len(starts)} of them shown together",
            hints=show_line(where),
        )
    return [bit if t >= starts[-turns] else 0 for t, bit in enumerate(token_mask)]


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
    """Train for dpo.max_num_steps, resuming from the newest checkpoint.

    Args:
        policy: built with `DpoLoss(config.dpo)` and its reference weights.
        train: pairs; `policy.train_global_batch_size` of them make a step.
        validation: pairs nothing is trained on; may be empty.

    Returns:
        Summary: steps, training loss and accuracy of the last step, validation loss and accuracy before and after.
    """
    settings = config.dpo
    pairs_per_step = config.policy.train_global_batch_size
    total = total_steps(config, len(train))
    step = 0
    before: dict[str, float] = {}
    metrics: dict[str, float] = {}
    latest = checkpoints.latest()
    if latest is not None:
        policy.load_checkpoint(latest.policy_path)
        step = latest.step
        state = latest.state()
        before, metrics = dict(state["validation_before"]), dict(state["metrics"])
        reporter.event("resumed", step=step)
    elif validation:
        before = validate_pairs(policy, validation, config)
    batches = shuffled_batches(train, pairs_per_step, epochs=settings.max_num_epochs, seed=settings.seed, skip=step)
    checkpoints.steps_begin()
    for pairs in batches:
        if step >= total:
            break
        started = time.perf_counter()
        batch = pair_batch(pairs, divisible_by=config.policy.make_sequence_length_divisible_by)
        batch.reference_logprobs = policy.reference_logprobs(batch)
        reference_s = time.perf_counter() - started
        metrics = policy.train_step(batch)
        step += 1
        seconds = time.perf_counter() - started
        metrics["timing/reference_logprobs_s"] = reference_s
        metrics["timing/train_s"] = seconds - reference_s
        metrics["train_tokens_per_s"] = float(batch.lengths.sum()) / seconds
        if settings.val_period > 0 and step % settings.val_period == 0 and validation:
            metrics.update({f"validation/{k}": v for k, v in validate_pairs(policy, validation, config).items()})
        reporter.metrics(step, metrics)
        reporter.progress(f"dpo  loss {metrics['loss']:.3f}  accuracy {metrics['accuracy']:.0%}", step, total)
        checkpoints.check()
        if checkpoints.due(step, last=False):
            validated = [f"validation/{name}" for name in before] if settings.val_period > 0 else []
            checkpoints.save(step, policy, {"validation_before": before, "metrics": metrics}, reported=validated)
            if step < total:
                checkpoints.refuse_overtime(step, total, reporter)
    summary: dict[str, Any] = {
        "steps": step,
        "train_loss": metrics.get("loss"),
        "train_accuracy": metrics.get("accuracy"),
    }
    if validation:
        after = validate_pairs(policy, validation, config)
        summary.update({f"validation_{name}_before": value for name, value in before.items()})
        summary.update({f"validation_{name}": value for name, value in after.items()})
    return summary


def total_steps(config: DpoConfig, pairs: int) -> int:
    """Optimizer steps that `pairs` training pairs give."""
    settings = config.dpo
    return min(settings.max_num_steps, settings.max_num_epochs * (pairs // config.policy.train_global_batch_size))


def validate_pairs(policy: Policy, pairs: Sequence[PreferencePair], config: DpoConfig) -> dict[str, float]:
    """Loss, accuracy and reward margin over at most dpo.val_batches batches of pairs, without a gradient."""
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
            totals[name] = totals.get(name, 0.0) + metrics[name] * len(part) / len(chosen)
    return totals
