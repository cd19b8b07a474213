"""Direct preference optimisation on the engine's policies: pairs, batches, the loop.

    pairs = read_pairs(file)                              chosen and rejected answer to one prompt
    for each batch of pairs:
        batch = pair_batch(pairs)                         rows 2k, 2k + 1
        batch.reference_logprobs = policy.reference...    the weights it started from
        policy.train_step(batch)                          losses/supervised.py

Only answers are trained, never the prompt. The policy keeps both rows of a pair in one micro-batch, packed or not.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from nemotron_steps.config.schema.dpo import DpoConfig
from nemotron_steps.engine.checkpoints import CheckpointManager
from nemotron_steps.engine.losses.loss import count_normalizers, finalize_metrics
from nemotron_steps.engine.losses.supervised import DpoLoss
from nemotron_steps.engine.reporting import Reporter
from nemotron_steps.engine.rollouts.data import read_rows
from nemotron_steps.engine.supervised.chat_tokens import ChatSequence, chat_sequences, none_fits
from nemotron_steps.engine.supervised.loop import batch_of, train_on_examples
from nemotron_steps.engine.types import Policy, TrainBatch
from nemotron_steps.errors import DataError, show_line
from nemotron_steps.models.chat import ChatFormat
from nemotron_steps.rows.layouts import read_pair
from nemotron_steps.rows.messages import wrong


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
