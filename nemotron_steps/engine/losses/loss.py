"""What a loss is to a policy: what is called per micro-batch, and what a policy must know of it before.

    loss, sums = loss_fn(logprobs, batch, normalizers)    # per micro-batch
    loss.backward()                                       # gradients add up over micro-batches
    sums = all_reduce_metric_sums(merge_metric_sums(parts), group)
    metrics = finalize_metrics(sums, normalizers)

Because `normalizers` count the global batch, gradients are *summed* over micro-batches and data-parallel ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

from nemotron_steps.engine.losses.metrics import MetricSums
from nemotron_steps.engine.losses.reduction import LossNormalizers

if TYPE_CHECKING:
    from nemotron_steps.engine.types import TrainBatch


class Loss(ABC):
    """A loss over logprobs. The attributes are what a policy plans its micro-batches and its output layer by."""

    rows_per_unit: int = 1
    """Consecutive rows that are read together and never split over micro-batches (2 for DPO's pairs)."""
    gradient_needs_advantage: bool = False
    """Whether a row whose advantages are all 0 has no gradient, so that a policy need not compute it."""
    temperature: float = 1.0
    """Of the distribution that `logprobs` are of: the one that rollouts are sampled from."""

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
            logprobs: [n, T] logprobs of batch.input_ids under the current weights, with gradient, token-aligned.
            batch: the same n sequences, on the same device.
            normalizers: counts over the global batch.
            entropy: [n, T] entropy of the policy's distribution at each token, nats, for the metric only.

        Returns:
            (scalar loss, detached metric sums; see metrics.py).

        Raises:
            EngineError: the batch lacks something that the loss needs.
        """
