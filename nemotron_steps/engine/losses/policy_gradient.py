"""The clipped policy-gradient loss, GRPO and its relatives; KL estimators and importance weights."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

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
from nemotron_steps.errors import EngineError

if TYPE_CHECKING:
    from nemotron_steps.config.schema.grpo import LossFnConfig
    from nemotron_steps.engine.types import TrainBatch

KlType = Literal["k1", "k2", "k3"]


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

    w = exp(lp_prev - lp_gen) under `use_importance_sampling_correction`, truncated by `truncate_weights`. Under
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
        self, logprobs: Tensor, batch: TrainBatch, normalizers: LossNormalizers, entropy: Tensor | None = None
    ) -> tuple[Tensor, MetricSums]:
        """As `Loss.__call__`."""
        config = self.config
        whole = mask = loss_mask(batch.token_mask, batch.sample_mask)
        prev = logprobs.detach() if config.force_on_policy_ratio else batch.prev_logprobs
        if prev is None:
            expected = "logprobs under the policy that starts the step, unless loss_fn.force_on_policy_ratio is true"
            raise EngineError("the batch has no prev_logprobs", expected=expected)
        if self.sampled_from.truncated:
            mask = mask * ~(logprobs.detach().isneginf() | prev.isneginf())
        # Padding may hold anything, -inf included; 0 x inf in a backward pass is NaN, so replace instead of multiply.
        trained = mask > 0
        logprobs = _fill(logprobs, trained)
        generation = _fill(batch.generation_logprobs, trained)
        prev = _fill(prev, trained)

        raw, clipped = self._ratio(logprobs, prev, mask)
        token_loss = self._token_loss(raw, clipped, _fill(batch.advantages, trained), logprobs)
        weights, outside = self._correction(prev, generation, mask)
        if config.use_importance_sampling_correction:
            token_loss = token_loss * weights
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
                sums.update(_ratio_sums(raw, clipped, mask))
            sequences = batch.sample_mask.float().unsqueeze(-1)
            by_token = weights.shape == mask.shape
            name = "sampling_importance_ratio" if by_token else "sequence_importance_ratio"
            sums[name] = masked_sum(weights, mask if by_token else sequences)
            if outside is not None:
                by_token = outside.shape == mask.shape
                name = "is_oob_ratio" if by_token else "sequence_is_oob_ratio"
                sums[name] = masked_sum(outside, mask if by_token else sequences)
            # Entropy over the generator's samples, reweighted to the current policy.
            reweighting = importance_weights(logprobs, generation, mask)
            sums["approx_entropy"] = masked_sum(-reweighting * logprobs, mask)
            if entropy is not None:
                sums["entropy"] = masked_sum(entropy.float(), mask)
        return loss, sums

    def _ratio(self, logprobs: Tensor, prev: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
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

    def _token_loss(self, raw: Tensor, clipped: Tensor, advantages: Tensor, logprobs: Tensor) -> Tensor:
        config = self.config
        if config.use_cispo:
            return -advantages * clipped.detach() * logprobs
        loss = torch.maximum(-advantages * raw, -advantages * clipped)
        if config.ratio_clip_c is not None:
            bounded = torch.minimum(loss, -advantages * config.ratio_clip_c)
            loss = torch.where(advantages < 0, bounded, loss)
        return loss

    def _correction(self, prev: Tensor, generation: Tensor, mask: Tensor) -> tuple[Tensor, Tensor | None]:
        config = self.config
        weights = importance_weights(prev, generation, mask, sequence_level=config.sequence_level_importance_ratios)
        kind, upper = config.truncated_importance_sampling_type, config.truncated_importance_sampling_ratio
        if kind is None or upper is None:
            return weights, None
        lower = config.truncated_importance_sampling_ratio_min
        return truncate_weights(weights, prev, generation, mask, kind=kind, upper=upper, lower=lower)

    def _kl(self, logprobs: Tensor, generation: Tensor, batch: TrainBatch, trained: Tensor) -> Tensor:
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


def _fill(values: Tensor, keep: Tensor) -> Tensor:
    values = values.float()
    return torch.where(keep, values, torch.zeros_like(values))


def mismatch_sums(prev: Tensor, generation: Tensor, mask: Tensor, kind: KlType) -> MetricSums:
    """How far generator and trainer disagree on what was sampled; js as NeMo-RL has it: p over m and not m over p."""

    def kl(logprobs: Tensor, reference: Tensor, kind: KlType) -> Tensor:
        return kl_divergence(logprobs, reference, kind, input_clamp=None, output_clamp=None)

    log_mixture = torch.logaddexp(prev, generation) - math.log(2.0)
    jensen_shannon = 0.5 * (kl(log_mixture, prev, "k3") + kl(log_mixture, generation, "k3"))
    return {
        "token_mult_prob_error": masked_sum((generation - prev).abs().exp(), mask),
        "gen_kl_error": masked_sum(kl(generation, prev, kind), mask),
        "policy_kl_error": masked_sum(kl(prev, generation, kind), mask),
        "js_divergence_error": masked_sum(jensen_shannon, mask),
    }


def _ratio_sums(raw: Tensor, clipped: Tensor, mask: Tensor) -> MetricSums:
    high = torch.full_like(raw, torch.inf)
    nothing = raw.new_full((1,), torch.inf)  # so that a micro-batch of no rows has extrema too
    sums = {"clip_fraction": masked_sum((raw != clipped).float(), mask)}
    for name, values in (("probs_ratio", raw), ("probs_ratio_clamped", clipped)):
        sums[name] = masked_sum(values, mask)
        sums[f"{name}_min"] = torch.cat((torch.where(mask > 0, values, high).flatten(), nothing)).min()
        sums[f"{name}_max"] = torch.cat((torch.where(mask > 0, values, -high).flatten(), -nothing)).max()
    return sums


def kl_divergence(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    kind: KlType = "k3",
    *,
    input_clamp: float | None = 20.0,
    output_clamp: float | None = 10.0,
    weights: Tensor | None = None,
) -> Tensor:
    """Nats of KL(policy || reference) per token, any shape, times `weights` where they are given. log r = clamp(lp_ref
    - lp, +-input_clamp); k1 = -log r; k2 = (log r)^2 / 2; k3 = exp(log r) - 1 - log r. Then the weights are multiplied
    in, and the product is clamped to +-output_clamp. A token whose log ratio is clamped has its weight detached, or the
    weight's gradient would go on pushing where the clamp means to stop."""
    unbounded = log_ratio = reference_logprobs - logprobs
    if input_clamp is not None:
        log_ratio = unbounded.clamp(-input_clamp, input_clamp)
        if weights is not None:
            weights = torch.where(log_ratio == unbounded, weights, weights.detach())
    if kind == "k1":
        divergence = -log_ratio
    elif kind == "k2":
        divergence = 0.5 * log_ratio.square()
    else:
        # expm1 keeps the digits that exp(x) - 1 loses near x = 0, where trained policies live.
        divergence = torch.expm1(log_ratio) - log_ratio
    if weights is not None:
        divergence = weights * divergence
    if output_clamp is not None:
        divergence = divergence.clamp(-output_clamp, output_clamp)
    return divergence


def importance_weights(
    prev_logprobs: Tensor, generation_logprobs: Tensor, mask: Tensor, *, sequence_level: bool = False
) -> Tensor:
    """exp(lp_prev - lp_gen) per token, or over a sequence [n, 1]; 0 where not finite."""
    difference = torch.where(mask > 0, prev_logprobs - generation_logprobs, torch.zeros_like(prev_logprobs))
    if sequence_level:
        difference = difference.sum(dim=-1, keepdim=True)
    return torch.nan_to_num(difference.exp(), nan=0.0, posinf=0.0, neginf=0.0)


def truncate_weights(
    weights: Tensor,
    prev_logprobs: Tensor,
    generation_logprobs: Tensor,
    mask: Tensor,
    *,
    kind: Literal["tis", "icepop", "seq-mask-tis"],
    upper: float,
    lower: float | None,
) -> tuple[Tensor, Tensor]:
    """Bound importance weights, [n, T] or [n, 1]; also 1 where one was cut or dropped.

    - tis: clamp to [lower or 0, upper] (truncated importance sampling, Yao et al. 2025). A weight that was not finite,
      hence 0, stays 0.
    - icepop: 0 outside [lower, upper] (arXiv:2510.18855).
    - seq-mask-tis: a sequence whose geometric mean exp(mean_t(lp_prev - lp_gen)) leaves [lower, upper] is dropped.
    """
    if kind == "tis":
        floor = lower if lower is not None else 0.0
        outside = (weights > upper) | (weights < floor)
        return torch.where(weights == 0, weights, weights.clamp(floor, upper)), outside.float()
    assert lower is not None  # the config's rule
    judged = weights
    if kind == "seq-mask-tis":
        log_ratio = torch.nan_to_num(prev_logprobs - generation_logprobs, nan=0.0, posinf=0.0, neginf=0.0)
        judged = sequence_means(log_ratio, mask).exp().unsqueeze(-1)
    outside = (judged > upper) | (judged < lower)
    return torch.where(outside, torch.zeros_like(weights), weights), outside.float()


def sequence_logprob_error(prev_logprobs: Tensor, generation_logprobs: Tensor, token_mask: Tensor) -> Tensor:
    """mean_t exp|lp_gen - lp_prev| of each sequence, [n]: 1 when both agree."""
    error = (generation_logprobs - prev_logprobs).abs().exp()
    error = torch.nan_to_num(error, nan=torch.inf, posinf=torch.inf)
    return sequence_means(error, token_mask.float())
