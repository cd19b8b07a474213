"""The loss of on-policy distillation: how far the policy is from a row's teacher at every token it sampled.

The policy samples and the teacher grades, as a dense reward would: Agarwal et al. 2024 (arXiv:2306.13649), Thinking
Machines' "On-Policy Distillation" (2025), and with a teacher for each kind of prompt MiMo-V2-Flash (arXiv:2601.02780).
The divergence itself is teacher_kl.py's, computed at the policy's output layer, where whole distributions are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nemotron_steps.engine.losses.loss import Loss
from nemotron_steps.engine.losses.metrics import MetricSums
from nemotron_steps.engine.losses.policy_gradient import mismatch_sums
from nemotron_steps.engine.losses.reduction import (
    LossNormalizers,
    counts,
    loss_mask,
    masked_sum,
    reduce_over_batch,
)
from nemotron_steps.engine.losses.teacher_kl import TeacherKl
from nemotron_steps.errors import EngineError

if TYPE_CHECKING:
    from nemotron_steps.engine.types import TrainBatch


class DistillationLoss(Loss):
    """Sum over trained tokens of the divergence from the teacher, / N_tokens of the global batch.

    Rewards and advantages have no part in it. Where rollouts are older than the policy, its states are those that an
    older policy visits; the divergence at each of them is exact, so nothing is reweighted.
    """

    def __init__(self, divergence: TeacherKl) -> None:
        self.divergence = divergence

    def __call__(
        self,
        logprobs: torch.Tensor,
        batch: TrainBatch,
        normalizers: LossNormalizers,
        entropy: torch.Tensor | None = None,
        divergence: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, MetricSums]:
        """Loss and metric sums of one micro-batch; arguments as `Loss.__call__`, and

        Args:
            logprobs: for the metrics only.
            divergence: [n, T] from the teacher at each token, nats, with gradient.

        Raises:
            EngineError: no divergence: the policy cannot compute one, or nothing scored the batch.
        """
        if divergence is None:
            raise EngineError("distillation needs the divergence from a teacher", where="engine/losses/distillation.py")
        mask = loss_mask(batch.token_mask, batch.sample_mask)
        loss = reduce_over_batch(divergence.float(), mask, normalizers, token_level=True)
        with torch.no_grad():
            zeros = torch.zeros_like(mask)
            current = torch.where(mask > 0, logprobs.float(), zeros)
            sampled = torch.where(mask > 0, batch.generation_logprobs.float(), zeros)
            sums: MetricSums = {
                "loss": loss.detach(),
                "teacher_divergence": masked_sum(divergence.float(), mask),
                **mismatch_sums(current, sampled, mask, "k3"),
                **counts(batch, mask),
            }
            if batch.teacher_topk_logprobs is not None:
                # Trained tokens only: elsewhere the rows hold zeros.
                sums["teacher_topk_mass"] = masked_sum(batch.teacher_topk_logprobs.float().exp().sum(-1), mask)
            if entropy is not None:
                sums["entropy"] = masked_sum(entropy.float(), mask)
        return loss, sums
