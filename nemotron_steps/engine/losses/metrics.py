"""How metrics of micro-batches become metrics of a step.

Losses return *sums* (`MetricSums`) so that micro-batches and data-parallel ranks combine exactly: sums add, extrema
combine by min or max, and `finalize_metrics` divides by the global counts once at the end. `METRIC_KINDS` says which
metric is which; a name that is missing there is an error rather than a guess. `combine_updates` puts the updates of
one step together.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import chain
from statistics import fmean

import torch
import torch.distributed as dist

from nemotron_steps.engine.losses.reduction import LossNormalizers

MetricSums = dict[str, torch.Tensor]


class MetricKind(StrEnum):
    """How one metric combines over micro-batches and ranks, and what it is divided by in the end."""

    TOKEN_MEAN = "token_mean"
    """Adds up; divided by the trained tokens of the global batch."""
    SEQUENCE_MEAN = "sequence_mean"
    """Adds up; divided by the trained sequences of the global batch."""
    PAIR_MEAN = "pair_mean"
    """Adds up; divided by the trained pairs of the global batch, two sequences each (DPO)."""
    TOTAL = "total"
    """Adds up; is the value (losses, already normalised over the global batch). Of several updates, their mean."""
    COUNT = "count"
    """Adds up, over the updates of a step too."""
    MINIMUM = "minimum"
    """Smallest over everything; left out when nothing was trained."""
    MAXIMUM = "maximum"
    """Largest over everything; left out when nothing was trained."""


METRIC_KINDS: dict[str, MetricKind] = {
    "loss": MetricKind.TOTAL,
    "actor_loss": MetricKind.TOTAL,
    "kl_penalty": MetricKind.TOTAL,
    "probs_ratio": MetricKind.TOKEN_MEAN,
    "probs_ratio_clamped": MetricKind.TOKEN_MEAN,
    "probs_ratio_min": MetricKind.MINIMUM,
    "probs_ratio_max": MetricKind.MAXIMUM,
    "probs_ratio_clamped_min": MetricKind.MINIMUM,
    "probs_ratio_clamped_max": MetricKind.MAXIMUM,
    "clip_fraction": MetricKind.TOKEN_MEAN,
    "token_mult_prob_error": MetricKind.TOKEN_MEAN,
    "gen_kl_error": MetricKind.TOKEN_MEAN,
    "policy_kl_error": MetricKind.TOKEN_MEAN,
    "js_divergence_error": MetricKind.TOKEN_MEAN,
    "sampling_importance_ratio": MetricKind.TOKEN_MEAN,
    "sequence_importance_ratio": MetricKind.SEQUENCE_MEAN,
    "is_oob_ratio": MetricKind.TOKEN_MEAN,
    "sequence_is_oob_ratio": MetricKind.SEQUENCE_MEAN,
    "outside_truncation": MetricKind.TOKEN_MEAN,
    "approx_entropy": MetricKind.TOKEN_MEAN,
    "entropy": MetricKind.TOKEN_MEAN,
    "nll": MetricKind.TOKEN_MEAN,
    "teacher_divergence": MetricKind.TOKEN_MEAN,
    "teacher_topk_mass": MetricKind.TOKEN_MEAN,
    "preference_loss": MetricKind.TOTAL,
    "sft_loss": MetricKind.TOTAL,
    "accuracy": MetricKind.PAIR_MEAN,
    "rewards_chosen": MetricKind.PAIR_MEAN,
    "rewards_rejected": MetricKind.PAIR_MEAN,
    "rewards_margin": MetricKind.PAIR_MEAN,
    "num_valid_tokens": MetricKind.COUNT,
    "num_valid_samples": MetricKind.COUNT,
}
"""Every metric a loss may return."""


def merge_metric_sums(parts: Iterable[Mapping[str, torch.Tensor]]) -> MetricSums:
    """Combine the sums of several micro-batches of one rank."""
    merged: MetricSums = {}
    for part in parts:
        for name, value in part.items():
            if name not in merged:
                merged[name] = value
                continue
            kind = METRIC_KINDS[name]
            if kind is MetricKind.MINIMUM:
                merged[name] = torch.minimum(merged[name], value)
            elif kind is MetricKind.MAXIMUM:
                merged[name] = torch.maximum(merged[name], value)
            else:
                merged[name] = merged[name] + value
    return merged


def all_reduce_metric_sums(sums: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None = None) -> MetricSums:
    """Combine sums over a data-parallel group: at most three collectives. Every rank must hold the same names."""
    operations = {MetricKind.MINIMUM: dist.ReduceOp.MIN, MetricKind.MAXIMUM: dist.ReduceOp.MAX}
    by_operation: dict[dist.ReduceOp.RedOpType, list[str]] = {}
    for name in sorted(sums):
        by_operation.setdefault(operations.get(METRIC_KINDS[name], dist.ReduceOp.SUM), []).append(name)
    reduced: MetricSums = {}
    for operation, names in by_operation.items():
        stacked = torch.stack([sums[name].detach().double() for name in names])
        dist.all_reduce(stacked, op=operation, group=group)
        reduced.update(zip(names, stacked.unbind(), strict=True))
    return reduced


def finalize_metrics(sums: Mapping[str, torch.Tensor], normalizers: LossNormalizers) -> dict[str, float]:
    """Global-batch metrics from sums that cover the whole global batch.

    Args:
        sums: merged over every micro-batch and reduced over every data-parallel rank.
        normalizers: the same global counts the loss was given.
    """
    metrics: dict[str, float] = {}
    for name, value in sums.items():
        kind = METRIC_KINDS[name]
        number = float(value)
        if kind is MetricKind.TOKEN_MEAN:
            number /= max(normalizers.tokens, 1.0)
        elif kind is MetricKind.SEQUENCE_MEAN:
            number /= max(normalizers.sequences, 1.0)
        elif kind is MetricKind.PAIR_MEAN:
            number /= max(normalizers.sequences / 2, 1.0)
        elif kind in (MetricKind.MINIMUM, MetricKind.MAXIMUM) and normalizers.tokens == 0:
            continue
        metrics[name] = number
    return metrics


def combine_updates(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of a step from those of its updates, one after the other on parts of its batch.

    Means are weighted with what they are means over, so that they are those of the whole batch; extrema and counts are
    the whole batch's too. Losses, and what is not in METRIC_KINDS (gradient norm, learning rate), are averaged. A NaN
    counts for nothing, unless there is nothing else.
    """
    combined: dict[str, float] = {}
    for name in dict.fromkeys(chain.from_iterable(updates)):
        kind = METRIC_KINDS.get(name)
        weight_of = _WEIGHTS.get(kind) if kind is not None else None
        known = [(u[name], u.get(weight_of, 1.0) if weight_of else 1.0) for u in updates if name in u]
        known = [(value, weight) for value, weight in known if value == value] or [(math.nan, 1.0)]
        values, weights = zip(*known, strict=True)
        if kind is MetricKind.MINIMUM:
            combined[name] = min(values)
        elif kind is MetricKind.MAXIMUM:
            combined[name] = max(values)
        elif kind is MetricKind.COUNT:
            combined[name] = math.fsum(values)
        elif math.fsum(weights) > 0:
            combined[name] = math.fsum(map(operator.mul, values, weights)) / math.fsum(weights)
        else:
            combined[name] = fmean(values)
    return combined


_WEIGHTS = {
    MetricKind.TOKEN_MEAN: "num_valid_tokens",
    MetricKind.SEQUENCE_MEAN: "num_valid_samples",
    MetricKind.PAIR_MEAN: "num_valid_samples",
}
"""What the mean of one update counts for."""
