"""What a loss is to a policy: what is called per micro-batch, and what a policy must know of it before.

    loss, sums = loss_fn(logprobs, batch, normalizers)    # per micro-batch
    loss.backward()                                       # gradients add up over micro-batches
    sums = all_reduce_metric_sums(merge_metric_sums(parts), group)
    metrics = finalize_metrics(sums, normalizers)

Because `normalizers` count the global batch, gradients are *summed* over micro-batches and data-parallel ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from nemotron_steps.engine.losses.metrics import MetricSums
from nemotron_steps.engine.losses.reduction import LossNormalizers

if TYPE_CHECKING:
    from nemotron_steps.config.schema.policy import GenerationConfig
    from nemotron_steps.engine.types import TrainBatch


@dataclass(frozen=True)
class SampledFrom:
    """What rollouts are sampled from, given a policy's logits. A ratio of probabilities is one of these distributions,
    so a policy's logprobs are of them too."""

    temperature: float = 1.0
    top_p: float = 1.0
    """Of the tokens left by top_k, the fewest heaviest whose share reaches this; 1: all."""
    top_k: int = 0
    """The heaviest so many tokens; 0: all."""

    @classmethod
    def of(cls, config: GenerationConfig) -> SampledFrom:
        """As `policy.generation` says."""
        return cls(config.temperature, config.top_p, config.top_k)

    @property
    def truncated(self) -> bool:
        """Whether some tokens have probability 0; their logprob is -inf."""
        return self.top_p < 1 or self.top_k > 0


class Loss(ABC):
    """A loss over logprobs. The attributes are what a policy plans its micro-batches and its output layer by."""

    rows_per_unit: int = 1
    """Consecutive rows that are read together and never split over micro-batches (2 for DPO's pairs)."""
    gradient_needs_advantage: bool = False
    """Whether a row whose advantages are all 0 has no gradient, so that a policy need not compute it."""
    sampled_from: SampledFrom = SampledFrom()
    """What `logprobs` are of."""

    @abstractmethod
    def __call__(
        self,
        logprobs: torch.Tensor,
        batch: TrainBatch,
        normalizers: LossNormalizers,
        entropy: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, MetricSums]:
        """Loss and metric sums of one micro-batch.

        Args:
            logprobs: [n, T] logprobs of batch.input_ids under the current weights, with gradient, token-aligned; -inf
                for tokens that a truncated distribution leaves out.
            batch: the same n sequences, on the same device.
            normalizers: counts over the global batch.
            entropy: [n, T] entropy of the policy's distribution at each token, nats, for the metric only.

        Returns:
            (scalar loss, detached metric sums; see metrics.py).

        Raises:
            EngineError: the batch lacks something that the loss needs.
        """
