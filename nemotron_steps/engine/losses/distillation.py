"""On-policy distillation: the loss over a policy's divergence from a row's teacher, and that divergence.

Per position, p the policy's and q the teacher's next-token distribution:

    forward = sum_v q (log q - log p)        the policy covers what the teacher may say
    reverse = sum_v p (log p - log q)        the policy avoids what the teacher would not say
    mixed   = mixed_kl_weight forward + (1 - mixed_kl_weight) reverse

Of a teacher's top-k tokens S alone, q is its softmax over S, and p the policy's softmax over S too, or under
`zero_outside_topk` over everything, with log q = -100 outside of S (NeMo-RL's DistillationLossFn). Gradients are
written out, so that logits exist for a chunk of tokens at a time (engine/policy/logprob.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from nemotron_steps.engine.losses.loss import (
    Loss,
    LossNormalizers,
    MetricSums,
    counts,
    loss_mask,
    masked_sum,
    reduce_over_batch,
)
from nemotron_steps.engine.losses.policy_gradient import mismatch_sums
from nemotron_steps.errors import EngineError

if TYPE_CHECKING:
    from nemotron_steps.engine.types import TrainBatch


TeacherKlType = Literal["forward", "reverse", "mixed"]

LOG_INFINITESIMAL = -100.0


@dataclass(frozen=True)
class TeacherKl:
    """Which divergence; keys as `loss_fn.*`."""

    kl_type: TeacherKlType = "mixed"
    mixed_kl_weight: float = 0.5
    zero_outside_topk: bool = False

    @property
    def forward(self) -> float:
        """Weight of the forward KL; 1 less it is that of the reverse."""
        return {"forward": 1.0, "reverse": 0.0, "mixed": self.mixed_kl_weight}[self.kl_type]

    def of_all(
        self, log_p: torch.Tensor, log_q: torch.Tensor, add: Callable[[torch.Tensor], torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Nats [n] over whole distributions, and the gradient in this rank's logits."""
        weight, p, q, ratio = self.forward, log_p.exp(), log_q.exp(), log_p - log_q
        forward, reverse = add(torch.stack(((-q * ratio).sum(-1), (p * ratio).sum(-1))))
        value = weight * forward + (1 - weight) * reverse
        return value, weight * (p - q) + (1 - weight) * p * (ratio - reverse[:, None])

    def of_chosen(
        self, chosen: torch.Tensor, teacher: torch.Tensor, lse: torch.Tensor, negative_entropy: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """The divergence over a teacher's top-k tokens: nats [n], and its gradient in the chosen logits [n, k]. chosen
        [n, k]: the policy's logits; teacher [n, k]: its log softmax over them; lse [n] of all the policy's logits;
        negative_entropy [n]: sum_v p log p. Last comes None, or a [n], where p (a + (1 - `forward`) log p) is to be
        added to the gradient in every logit."""
        weight = self.forward
        q = teacher.exp()
        if not self.zero_outside_topk:
            log_p = chosen.log_softmax(-1)
            p, ratio = log_p.exp(), log_p - teacher
            reverse = (p * ratio).sum(-1)
            value = weight * -(q * ratio).sum(-1) + (1 - weight) * reverse
            gradient = weight * (p - q) + (1 - weight) * p * (ratio - reverse[:, None])
            return value, gradient, None
        log_p = chosen - lse[:, None]
        p = log_p.exp()
        rest = 1 - p.sum(-1)
        forward = (q * (teacher - log_p)).sum(-1)
        reverse = negative_entropy - (p * teacher).sum(-1) - LOG_INFINITESIMAL * rest
        value = weight * forward + (1 - weight) * reverse
        gradient = -weight * q + (1 - weight) * p * (LOG_INFINITESIMAL - teacher)
        everywhere = weight + (1 - weight) * (-LOG_INFINITESIMAL - reverse)
        return value, gradient, everywhere


class DistillationLoss(Loss):
    """Sum over trained tokens of the divergence from the teacher, / N_tokens of the global batch."""

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
        """As `Loss.__call__`; divergence [n, T] in nats, with gradient."""
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
