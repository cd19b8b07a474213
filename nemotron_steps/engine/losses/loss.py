"""What a loss is to a policy: what is called per micro-batch, and what a policy must know of it before.

    loss, sums = loss_fn(logprobs, batch, normalizers)    # per micro-batch
    loss.backward()                                       # gradients add up over micro-batches
    sums = all_reduce_metric_sums(merge_metric_sums(parts), group)
    metrics = finalize_metrics(sums, normalizers)

Because `normalizers` count the global batch, gradients are *summed* over micro-batches and data-parallel ranks.
"""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from nemotron_steps.config.schema.policy import GenerationConfig
    from nemotron_steps.engine.types import TrainBatch


@dataclass(frozen=True)
class SampledFrom:
    """What rollouts are sampled from, and what a policy's logprobs are of."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    @classmethod
    def of(cls, config: GenerationConfig) -> SampledFrom:
        """As `policy.generation` says."""
        return cls(config.temperature, config.top_p, config.top_k)

    @property
    def truncated(self) -> bool:
        """Whether some tokens have probability 0; their logprob is -inf."""
        return self.top_p < 1 or self.top_k > 0


class Loss(ABC):
    """A loss over logprobs."""

    rows_per_unit: int = 1  # consecutive rows read together: 2 for DPO's pairs
    gradient_needs_advantage: bool = False  # rows whose advantages are all 0 then have no gradient
    sampled_from: SampledFrom = SampledFrom()

    @abstractmethod
    def __call__(
        self,
        logprobs: torch.Tensor,
        batch: TrainBatch,
        normalizers: LossNormalizers,
        entropy: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, MetricSums]:
        """The scalar loss of one micro-batch, and its detached metric sums (see METRIC_KINDS). logprobs [n, T]: of
        batch.input_ids under the current weights, with gradient, -inf for tokens that a truncated distribution leaves
        out; entropy [n, T] of the distribution at each token, nats, for the metric only."""


EPSILON = 1e-8
"""Keeps an empty batch from dividing by zero."""


@dataclass(frozen=True)
class LossNormalizers:
    """Trained tokens and sequences of the global batch."""

    tokens: float
    sequences: float


def loss_mask(token_mask: torch.Tensor, sample_mask: torch.Tensor) -> torch.Tensor:
    """float32 [n, T], which tokens are trained; none of column 0, which nothing predicts."""
    mask = token_mask.float() * sample_mask.float().unsqueeze(-1)
    mask[:, :1] = 0.0
    return mask


def count_normalizers(batch: TrainBatch) -> LossNormalizers:
    """Counts of one global batch."""
    mask = loss_mask(batch.token_mask, batch.sample_mask)
    return LossNormalizers(
        tokens=float(mask.sum(dtype=torch.float64)),
        sequences=float(batch.sample_mask.sum(dtype=torch.float64)),
    )


def counts(batch: TrainBatch, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """The metrics that say how much of a batch is trained."""
    return {"num_valid_tokens": mask.sum(), "num_valid_samples": batch.sample_mask.float().sum()}


def masked_sum(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sum of `values` where `mask` is not 0; NaN and infinity elsewhere do not leak."""
    return torch.where(mask > 0, values * mask, torch.zeros_like(values)).sum()


def sequence_means(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean over the masked tokens of each sequence, [n, T] -> [n]; 0 for a sequence with none."""
    total = torch.where(mask > 0, values * mask, torch.zeros_like(values)).sum(dim=-1)
    return total / (mask.sum(dim=-1) + EPSILON)


def reduce_over_batch(
    values: torch.Tensor, mask: torch.Tensor, normalizers: LossNormalizers, *, token_level: bool
) -> torch.Tensor:
    """This micro-batch's share of the global-batch mean of `values` [n, T], a scalar. Token level: every token of the
    batch weighs the same (DAPO, arXiv:2503.14476). Sequence level: the mean of each sequence does (GRPO,
    arXiv:2402.03300)."""
    if token_level:
        return masked_sum(values, mask) / (normalizers.tokens + EPSILON)
    return sequence_means(values, mask).sum() / (normalizers.sequences + EPSILON)


MetricSums = dict[str, torch.Tensor]

METRIC_KINDS: dict[str, str] = {
    name: kind
    for kind, names in {
        "total": "loss actor_loss kl_penalty preference_loss sft_loss",
        "token mean": "probs_ratio probs_ratio_clamped clip_fraction token_mult_prob_error gen_kl_error "
        "policy_kl_error js_divergence_error sampling_importance_ratio is_oob_ratio outside_truncation approx_entropy "
        "entropy nll teacher_divergence teacher_topk_mass",
        "sequence mean": "sequence_importance_ratio sequence_is_oob_ratio",
        "pair mean": "accuracy rewards_chosen rewards_rejected rewards_margin",
        "minimum": "probs_ratio_min probs_ratio_clamped_min",
        "maximum": "probs_ratio_max probs_ratio_clamped_max",
        "count": "num_valid_tokens num_valid_samples",
    }.items()
    for name in names.split()
}
"""Metric → how it combines over micro-batches and ranks."""
_WEIGHTS = {
    "token mean": "num_valid_tokens",
    "sequence mean": "num_valid_samples",
    "pair mean": "num_valid_samples",
}


def merge_metric_sums(parts: Iterable[Mapping[str, torch.Tensor]]) -> MetricSums:
    """Combine the sums of several micro-batches of one rank."""
    combine = {"minimum": torch.minimum, "maximum": torch.maximum}
    merged: MetricSums = {}
    for part in parts:
        for name, value in part.items():
            function = combine.get(METRIC_KINDS[name], torch.add)
            merged[name] = function(merged[name], value) if name in merged else value
    return merged


def all_reduce_metric_sums(sums: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None = None) -> MetricSums:
    """Combine sums, of the same names on every rank, over a data-parallel group."""
    operations = {"minimum": dist.ReduceOp.MIN, "maximum": dist.ReduceOp.MAX}
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
    """Global-batch metrics from sums over every micro-batch and data-parallel rank."""
    tokens, sequences = normalizers.tokens, normalizers.sequences
    divisors = {"token mean": tokens, "sequence mean": sequences, "pair mean": sequences / 2}
    metrics: dict[str, float] = {}
    for name, value in sums.items():
        kind = METRIC_KINDS[name]
        if kind in ("minimum", "maximum") and tokens == 0:
            continue
        metrics[name] = float(value) / max(divisors.get(kind, 1.0), 1.0)
    return metrics


def combine_updates(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of a step from those of its updates on parts of its batch: of means, the mean of the whole batch. Losses
    and what is not in METRIC_KINDS are averaged. A NaN counts for nothing, unless there is nothing else."""
    combined: dict[str, float] = {}
    for name in dict.fromkeys(chain.from_iterable(updates)):
        kind = METRIC_KINDS.get(name, "")
        weight_of = _WEIGHTS.get(kind)
        known = [(u[name], u.get(weight_of, 1.0) if weight_of else 1.0) for u in updates if name in u]
        known = [(value, weight) for value, weight in known if value == value] or [(math.nan, 1.0)]
        values, weights = zip(*known, strict=True)
        if kind == "minimum":
            combined[name] = min(values)
        elif kind == "maximum":
            combined[name] = max(values)
        elif kind == "count":
            combined[name] = math.fsum(values)
        elif math.fsum(weights) > 0:
            combined[name] = math.fsum(map(operator.mul, values, weights)) / math.fsum(weights)
        else:
            combined[name] = fmean(values)
    return combined
