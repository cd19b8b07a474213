"""The clipped policy-gradient loss: GRPO and its relatives."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from nemotron_steps.engine.losses.loss import (
    Loss,
    LossNormalizers,
    MetricSums,
    SampledFrom,
    counts,
    loss_mask,
    masked_sum,
    reduce_over_batch,
    sequence_means,
)
from nemotron_steps.engine.losses.ratios import (
    ImportanceWeights,
    KlType,
    importance_weights,
    kl_divergence,
    truncate_weights,
)
from nemotron_steps.errors import EngineError

if TYPE_CHECKING:
    from nemotron_steps.config.schema.grpo import LossFnConfig
    from nemotron_steps.engine.types import TrainBatch


class PolicyGradientLoss(Loss):
    """The clipped policy-gradient loss with a KL penalty, under NeMo-RL's `loss_fn.*` keys.

    Per token, with r the probability ratio, A the advantage, w the behaviour correction and beta the KL coefficient:

        l = max(-A r, -A clip(r, 1 - ratio_clip_min, 1 + ratio_clip_max))          PPO, arXiv:1707.06347
        l = min(l, -A ratio_clip_c) where A < 0                                    dual clip, arXiv:1912.09729
        loss = reduce(w l) + beta reduce(KL(policy || reference))

    r = exp(lp - lp_prev), or
    - `force_on_policy_ratio`: exp(lp - sg(lp)), 1 with the gradient of lp; one update per batch of rollouts
    - `disable_ppo_ratio`: lp itself (REINFORCE, arXiv:2402.14740)
    - `sequence_level_importance_ratios`: exp(mean_t(lp - lp_prev)) per sequence (GSPO, arXiv:2507.18071), unless
      `force_on_policy_ratio` is set
    and `use_cispo`: l = -A sg(clip(r)) lp (CISPO, arXiv:2506.13585).

    w = exp(lp_prev - lp_gen) under `use_importance_sampling_correction`, truncated as ratios.py says. Under
    `force_on_policy_ratio` lp_prev is sg(lp) here and in the metrics, also where the batch holds prev logprobs that
    were computed for something else: the policy has not moved since. The KL term is weighted by exp(lp - sg(lp)), which
    adds the score-function gradient, or under `use_on_policy_kl_approximation` by exp(lp - lp_gen).

    Under top_p or top_k, a token that the generator sampled and that this policy, or the one that starts the step,
    would not have kept teaches nothing; it still counts in the normalisation.
    """

    def __init__(self, config: LossFnConfig, sampled_from: SampledFrom = SampledFrom()) -> None:  # noqa: B008  (frozen)
        self.config = config
        self.sampled_from = sampled_from
        self.kl_coefficient = 0.0 if config.use_kl_in_reward else config.reference_policy_kl_penalty
        self.gradient_needs_advantage = self.kl_coefficient == 0.0

    def __call__(
        self,
        logprobs: torch.Tensor,
        batch: TrainBatch,
        normalizers: LossNormalizers,
        entropy: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, MetricSums]:
        """As `Loss.__call__`."""
        config = self.config
        whole = mask = loss_mask(batch.token_mask, batch.sample_mask)
        prev = self._prev(logprobs, batch)
        if self.sampled_from.truncated:
            mask = mask * ~(logprobs.detach().isneginf() | prev.isneginf())
        # Padding may hold anything, -inf included; 0 x inf in a backward pass is NaN, so replace instead of multiply.
        trained = mask > 0
        logprobs = _fill(logprobs, trained)
        generation = _fill(batch.generation_logprobs, trained)
        prev = _fill(prev, trained)
        advantages = _fill(batch.advantages, trained)

        raw, clipped = self._ratio(logprobs, prev, mask)
        correction = self._correction(prev, generation, mask)
        token_loss = self._token_loss(raw, clipped, advantages, logprobs)
        if config.use_importance_sampling_correction:
            token_loss = token_loss * correction.weights
        actor_loss = reduce_over_batch(token_loss, mask, normalizers, token_level=config.token_level_loss)
        loss = actor_loss
        sums: MetricSums = {"actor_loss": actor_loss.detach()}
        if self.kl_coefficient != 0.0:
            kl = self._kl(logprobs, generation, batch, trained)
            kl_penalty = reduce_over_batch(kl, mask, normalizers, token_level=config.token_level_loss)
            loss = loss + self.kl_coefficient * kl_penalty
            sums["kl_penalty"] = kl_penalty.detach()
        sums["loss"] = loss.detach()
        with torch.no_grad():
            sums.update(counts(batch, whole))
            if self.sampled_from.truncated:
                sums["outside_truncation"] = (whole - mask).sum()
            sums.update(mismatch_sums(prev, generation, mask, config.reference_policy_kl_type))
            if not config.disable_ppo_ratio:  # else the factor is the logprob itself
                sums.update(_ratio_sums(raw, clipped, mask, trained))
            sums.update(_correction_sums(correction, mask, batch.sample_mask))
            # Entropy over the generator's samples, reweighted to the current policy.
            reweighting = importance_weights(logprobs, generation, mask)
            sums["approx_entropy"] = masked_sum(-reweighting * logprobs, mask)
            if entropy is not None:
                sums["entropy"] = masked_sum(entropy.float(), mask)
        return loss, sums

    def _prev(self, logprobs: torch.Tensor, batch: TrainBatch) -> torch.Tensor:
        if self.config.force_on_policy_ratio:
            return logprobs.detach()
        if batch.prev_logprobs is None:
            expected = "logprobs under the policy that starts the step, unless loss_fn.force_on_policy_ratio is true"
            raise EngineError("the batch has no prev_logprobs", expected=expected)
        return batch.prev_logprobs

    def _ratio(
        self, logprobs: torch.Tensor, prev: torch.Tensor, mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The factor that carries the gradient, before and after the clip, [n, T]."""
        config = self.config
        if config.disable_ppo_ratio:
            return logprobs, logprobs
        log_ratio = logprobs - prev
        if config.force_on_policy_ratio:
            ratio = log_ratio.exp()
            return ratio, ratio
        if config.sequence_level_importance_ratios:
            log_ratio = sequence_means(log_ratio, mask).unsqueeze(-1).expand_as(logprobs)
        ratio = log_ratio.exp()
        return ratio, ratio.clamp(1.0 - config.ratio_clip_min, 1.0 + config.ratio_clip_max)

    def _token_loss(
        self, raw: torch.Tensor, clipped: torch.Tensor, advantages: torch.Tensor, logprobs: torch.Tensor
    ) -> torch.Tensor:
        config = self.config
        if config.use_cispo:
            return -advantages * clipped.detach() * logprobs
        loss = torch.maximum(-advantages * raw, -advantages * clipped)
        if config.ratio_clip_c is not None:
            bounded = torch.minimum(loss, -advantages * config.ratio_clip_c)
            loss = torch.where(advantages < 0, bounded, loss)
        return loss

    def _correction(self, prev: torch.Tensor, generation: torch.Tensor, mask: torch.Tensor) -> ImportanceWeights:
        config = self.config
        weights = importance_weights(prev, generation, mask, sequence_level=config.sequence_level_importance_ratios)
        kind, upper = config.truncated_importance_sampling_type, config.truncated_importance_sampling_ratio
        if kind is None or upper is None:
            return ImportanceWeights(weights, None)
        lower = config.truncated_importance_sampling_ratio_min
        return truncate_weights(weights, prev, generation, mask, kind=kind, upper=upper, lower=lower)

    def _kl(
        self, logprobs: torch.Tensor, generation: torch.Tensor, batch: TrainBatch, trained: torch.Tensor
    ) -> torch.Tensor:
        if batch.reference_logprobs is None:
            expected = f"they are needed: loss_fn.reference_policy_kl_penalty is {self.kl_coefficient}"
            raise EngineError("the batch has no reference_logprobs", expected=expected)
        config = self.config
        log_weight = logprobs - (generation if config.use_on_policy_kl_approximation else logprobs.detach())
        # Selected before exp: the gradient of exp(inf) would be NaN even where the weight is replaced by 0.
        finite = torch.isfinite(log_weight.detach().exp())
        weights = torch.where(finite, log_weight, torch.zeros_like(log_weight)).exp() * finite
        return kl_divergence(
            logprobs,
            _fill(batch.reference_logprobs, trained),
            config.reference_policy_kl_type,
            input_clamp=config.kl_input_clamp_value,
            output_clamp=config.kl_output_clamp_value,
            weights=weights,
        )


def _fill(values: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    values = values.float()
    return torch.where(keep, values, torch.zeros_like(values))


def mismatch_sums(prev: torch.Tensor, generation: torch.Tensor, mask: torch.Tensor, kind: KlType) -> MetricSums:
    """How far generator and trainer disagree on the tokens the generator sampled.

    js_divergence_error is as NeMo-RL has it, with p over the mean m and not m over p.
    """
    log_mixture = torch.logaddexp(prev, generation) - math.log(2.0)
    jensen_shannon = 0.5 * (_free_kl(log_mixture, prev, "k3") + _free_kl(log_mixture, generation, "k3"))
    return {
        "token_mult_prob_error": masked_sum((generation - prev).abs().exp(), mask),
        "gen_kl_error": masked_sum(_free_kl(generation, prev, kind), mask),
        "policy_kl_error": masked_sum(_free_kl(prev, generation, kind), mask),
        "js_divergence_error": masked_sum(jensen_shannon, mask),
    }


def _free_kl(logprobs: torch.Tensor, reference: torch.Tensor, kind: KlType) -> torch.Tensor:
    return kl_divergence(logprobs, reference, kind, input_clamp=None, output_clamp=None)


def _ratio_sums(raw: torch.Tensor, clipped: torch.Tensor, mask: torch.Tensor, trained: torch.Tensor) -> MetricSums:
    high = torch.full_like(raw, torch.inf)
    nothing = raw.new_full((1,), torch.inf)  # so that a micro-batch of no rows has extrema too
    sums = {
        "probs_ratio": masked_sum(raw, mask),
        "probs_ratio_clamped": masked_sum(clipped, mask),
        "clip_fraction": masked_sum((raw != clipped).float(), mask),
    }
    for name, values in (("probs_ratio", raw), ("probs_ratio_clamped", clipped)):
        sums[f"{name}_min"] = torch.cat((torch.where(trained, values, high).flatten(), nothing)).min()
        sums[f"{name}_max"] = torch.cat((torch.where(trained, values, -high).flatten(), -nothing)).max()
    return sums


def _correction_sums(correction: ImportanceWeights, mask: torch.Tensor, sample_mask: torch.Tensor) -> MetricSums:
    sequences = sample_mask.float().unsqueeze(-1)
    sums: MetricSums = {}
    if correction.weights.shape == mask.shape:
        sums["sampling_importance_ratio"] = masked_sum(correction.weights, mask)
    else:
        sums["sequence_importance_ratio"] = masked_sum(correction.weights, sequences)
    if correction.out_of_bounds is not None:
        if correction.out_of_bounds.shape == mask.shape:
            sums["is_oob_ratio"] = masked_sum(correction.out_of_bounds, mask)
        else:
            sums["sequence_is_oob_ratio"] = masked_sum(correction.out_of_bounds, sequences)
    return sums
