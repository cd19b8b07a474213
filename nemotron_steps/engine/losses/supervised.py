"""The losses of training without rollouts: SFT and DPO."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nemotron_steps.engine.batching import check_units
from nemotron_steps.engine.losses.loss import (
    EPSILON,
    Loss,
    LossNormalizers,
    MetricSums,
    counts,
    loss_mask,
    masked_sum,
    reduce_over_batch,
)
from nemotron_steps.errors import EngineError

if TYPE_CHECKING:
    from nemotron_steps.config.schema.dpo import DpoTrainConfig
    from nemotron_steps.engine.types import TrainBatch


class NegativeLogLikelihood(Loss):
    """Sum over trained tokens of -lp, / N_tokens of the global batch."""

    def __call__(
        self,
        logprobs: torch.Tensor,
        batch: TrainBatch,
        normalizers: LossNormalizers,
        entropy: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, MetricSums]:
        """As `Loss.__call__`."""
        mask = loss_mask(batch.token_mask, batch.sample_mask)
        loss = reduce_over_batch(-logprobs.float(), mask, normalizers, token_level=True)
        with torch.no_grad():
            sums = {"loss": loss.detach(), "nll": masked_sum(-logprobs.float(), mask), **counts(batch, mask)}
            if entropy is not None:
                sums["entropy"] = masked_sum(entropy.float(), mask)
        return loss, sums


class DpoLoss(Loss):
    """-log sigmoid(beta (delta_chosen - delta_rejected)), mean over the pairs of the global batch. delta = sum over
    trained tokens of (lp - lp_ref), or their mean under `preference_average_log_probs`. With `sft_loss_weight`, the
    negative log likelihood of chosen answers is added. The first step starts on the reference, so its preference loss
    is log 2 whatever the data. Of accuracy, a tie counts half."""

    rows_per_unit = 2

    def __init__(self, config: DpoTrainConfig) -> None:
        self.config = config

    def __call__(
        self,
        logprobs: torch.Tensor,
        batch: TrainBatch,
        normalizers: LossNormalizers,
        entropy: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, MetricSums]:
        """As `Loss.__call__`; chosen and rejected rows alternate."""
        check_units(len(batch), self.rows_per_unit)
        if batch.reference_logprobs is None:
            raise EngineError("DPO needs reference_logprobs", where="engine/losses/supervised.py", found="None")
        if not torch.equal(batch.sample_mask[0::2], batch.sample_mask[1::2]):
            raise EngineError("a preference pair is masked on one side only", where="engine/losses/supervised.py")
        config = self.config
        mask = loss_mask(batch.token_mask, batch.sample_mask)
        trained = mask > 0
        zeros = torch.zeros_like(mask)
        current = torch.where(trained, logprobs.float(), zeros)
        reference = torch.where(trained, batch.reference_logprobs.float(), zeros)
        pair_mask = batch.sample_mask[0::2].float()
        pairs = normalizers.sequences / 2 + EPSILON

        rewards = config.reference_policy_kl_penalty * _per_sequence(
            current - reference, mask, average=config.preference_average_log_probs
        )
        margin = rewards[0::2] - rewards[1::2]
        preference_loss = (-torch.nn.functional.logsigmoid(margin) * pair_mask).sum() / pairs
        chosen = _per_sequence(current, mask, average=config.sft_average_log_probs)[0::2]
        sft_loss = (-chosen * pair_mask).sum() / pairs
        loss = config.preference_loss_weight * preference_loss
        if config.sft_loss_weight:
            loss = loss + config.sft_loss_weight * sft_loss
        with torch.no_grad():
            sums: MetricSums = {
                "loss": loss.detach(),
                "preference_loss": preference_loss.detach(),
                "sft_loss": sft_loss.detach(),
                "accuracy": ((margin.sign() + 1) / 2 * pair_mask).sum(),
                "rewards_chosen": (rewards[0::2] * pair_mask).sum(),
                "rewards_rejected": (rewards[1::2] * pair_mask).sum(),
                "rewards_margin": (margin * pair_mask).sum(),
                **counts(batch, mask),
            }
            if entropy is not None:
                sums["entropy"] = torch.where(trained, entropy.float(), zeros).sum()
        return loss, sums


def _per_sequence(values: torch.Tensor, mask: torch.Tensor, *, average: bool) -> torch.Tensor:
    total = values.sum(dim=-1)
    return total / (mask.sum(dim=-1) + EPSILON) if average else total
