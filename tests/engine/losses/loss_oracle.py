"""The loss contract sequence by sequence and token by token, in plain float64 loops: nothing shared with the engine."""

import math
from dataclasses import dataclass

import numpy as np

from nemotron_steps.config.schema.grpo import LossFnConfig
from nemotron_steps.engine.types import TrainBatch


@dataclass
class Oracle:
    """Value, gradient and metrics that the contract gives to one whole batch."""

    batch: TrainBatch
    config: LossFnConfig

    def __post_init__(self) -> None:
        batch = self.batch
        mask = batch.token_mask.numpy() * batch.sample_mask.numpy()[:, None]
        self.gen = _float64(batch.generation_logprobs)
        self.given_prev = _float64(batch.prev_logprobs)
        self.ref = _float64(batch.reference_logprobs)
        self.adv = _float64(batch.advantages)
        self.sequences = [
            (n, [t for t in range(1, mask.shape[1]) if mask[n, t] > 0])
            for n in range(len(batch))
            if batch.sample_mask[n] > 0
        ]

    def loss(self, lp: np.ndarray, held: np.ndarray | None = None) -> float:
        """The loss. `held` is what stop-gradient terms see of the current logprobs (default: `lp` itself)."""
        actor, kl = self._terms(lp, lp if held is None else held)
        return self._reduce(actor) + self.beta * self._reduce(kl)

    def gradient(self, lp: np.ndarray, n: int, t: int) -> float:
        """d loss / d lp[n, t] by central differences, with stop-gradient terms held still."""
        up, down = lp.copy(), lp.copy()
        up[n, t] += 1e-6
        down[n, t] -= 1e-6
        return (self.loss(up, lp) - self.loss(down, lp)) / 2e-6

    def metrics(self, lp: np.ndarray) -> dict[str, float]:
        """Means over trained tokens, and `kl_penalty` over what the loss is over."""
        prev, gen, kind = self._prev(lp), self.gen, self.config.reference_policy_kl_type
        pairs = [(prev[n, t], gen[n, t]) for n, ts in self.sequences for t in ts]

        def mean(values: list[float]) -> float:
            return sum(values) / len(values)

        def half_jensen(p: float, m: float) -> float:
            return 0.5 * (math.exp(p - m) - 1 - (p - m))

        mixtures = [math.log(0.5 * math.exp(p) + 0.5 * math.exp(g)) for p, g in pairs]
        found = {
            "token_mult_prob_error": mean([math.exp(abs(g - p)) for p, g in pairs]),
            "gen_kl_error": mean([_kl(p - g, kind) for p, g in pairs]),
            "policy_kl_error": mean([_kl(g - p, kind) for p, g in pairs]),
            "js_divergence_error": mean(
                [half_jensen(p, m) + half_jensen(g, m) for (p, g), m in zip(pairs, mixtures, strict=True)]
            ),
        }
        actor, kl = self._terms(lp, lp)
        found |= {"actor_loss": self._reduce(actor), "loss": self.loss(lp)}
        if self.beta:
            found["kl_penalty"] = self._reduce(kl)
        ratios = [self._ratio(lp, lp, n, t, ts) for n, ts in self.sequences for t in ts]
        if not self.config.disable_ppo_ratio:
            for name, values in zip(("probs_ratio", "probs_ratio_clamped"), zip(*ratios, strict=True), strict=True):
                found |= {name: mean(list(values)), f"{name}_min": min(values), f"{name}_max": max(values)}
            found["clip_fraction"] = mean([float(r != clipped) for r, clipped in ratios])
        return {**found, **self._correction(prev)}

    def _correction(self, prev: np.ndarray) -> dict[str, float]:
        """Means of the weights, and of how many are outside their bounds: over tokens, or over sequences."""
        c, found = self.config, {}
        weights = [[self._weight(prev, self.gen, n, t, ts) for t in ts] for n, ts in self.sequences]
        each = [[row[0]] for row in weights] if c.sequence_level_importance_ratios else weights
        name = "sequence_importance_ratio" if c.sequence_level_importance_ratios else "sampling_importance_ratio"
        found[name] = sum(w for row in each for w, _ in row) / sum(map(len, each))
        if c.truncated_importance_sampling_type is not None:
            by_sequence = c.sequence_level_importance_ratios or c.truncated_importance_sampling_type == "seq-mask-tis"
            judged = [[row[0]] for row in weights] if by_sequence else weights
            name = "sequence_is_oob_ratio" if by_sequence else "is_oob_ratio"
            found[name] = sum(outside for row in judged for _, outside in row) / sum(map(len, judged))
        return found

    @property
    def beta(self) -> float:
        return 0.0 if self.config.use_kl_in_reward else self.config.reference_policy_kl_penalty

    def _prev(self, held: np.ndarray) -> np.ndarray:
        return held if self.config.force_on_policy_ratio else self.given_prev

    def _terms(self, lp: np.ndarray, held: np.ndarray) -> tuple[list[list[float]], list[list[float]]]:
        actor, kl = [], []
        for n, ts in self.sequences:
            actor.append([self._actor(lp, held, n, t, ts) for t in ts])
            kl.append([self._weighted_kl(lp, held, n, t) for t in ts] if self.beta else [0.0 for _ in ts])
        return actor, kl

    def _actor(self, lp: np.ndarray, held: np.ndarray, n: int, t: int, ts: list[int]) -> float:
        c, a, prev, gen = self.config, self.adv[n, t], self._prev(held), self.gen
        r, clipped = self._ratio(lp, held, n, t, ts)
        if c.use_cispo:
            held_ratio = math.exp(held[n, t] - prev[n, t])
            term = -a * min(max(held_ratio, 1 - c.ratio_clip_min), 1 + c.ratio_clip_max) * lp[n, t]
        else:
            term = max(-a * r, -a * clipped)
        if c.ratio_clip_c is not None and a < 0:
            term = min(term, -a * c.ratio_clip_c)
        return term * self._weight(prev, gen, n, t, ts)[0] if c.use_importance_sampling_correction else term

    def _ratio(self, lp: np.ndarray, held: np.ndarray, n: int, t: int, ts: list[int]) -> tuple[float, float]:
        """What carries the gradient, before and after the clip."""
        c, prev = self.config, self._prev(held)
        if c.force_on_policy_ratio:
            return (math.exp(lp[n, t] - held[n, t]),) * 2
        if c.disable_ppo_ratio:
            return lp[n, t], lp[n, t]
        if c.sequence_level_importance_ratios:
            r = math.exp(sum(lp[n, s] - prev[n, s] for s in ts) / len(ts))
        else:
            r = math.exp(lp[n, t] - prev[n, t])
        return r, min(max(r, 1 - c.ratio_clip_min), 1 + c.ratio_clip_max)

    def _weight(self, prev: np.ndarray, gen: np.ndarray, n: int, t: int, ts: list[int]) -> tuple[float, bool]:
        """The behaviour correction, and whether it was outside its bounds."""
        c, whole = self.config, [float(prev[n, s] - gen[n, s]) for s in ts]
        w = math.exp(sum(whole)) if c.sequence_level_importance_ratios else math.exp(prev[n, t] - gen[n, t])
        high, low = c.truncated_importance_sampling_ratio, c.truncated_importance_sampling_ratio_min
        if c.truncated_importance_sampling_type is None:
            return w, False
        assert high is not None
        if c.truncated_importance_sampling_type == "tis":
            bounded = min(max(w, low or 0.0), high)
            return bounded, bounded != w
        assert low is not None
        judged = w if c.truncated_importance_sampling_type == "icepop" else math.exp(sum(whole) / len(whole))
        return (w, False) if low <= judged <= high else (0.0, True)

    def _weighted_kl(self, lp: np.ndarray, held: np.ndarray, n: int, t: int) -> float:
        c = self.config
        log_ratio = self.ref[n, t] - lp[n, t]
        live = lp
        if c.kl_input_clamp_value is not None and abs(log_ratio) > c.kl_input_clamp_value:
            log_ratio = math.copysign(c.kl_input_clamp_value, log_ratio)
            live = held  # where the input is clamped, the weight has no gradient either
        base = self.gen if c.use_on_policy_kl_approximation else held
        product = math.exp(live[n, t] - base[n, t]) * _kl(log_ratio, c.reference_policy_kl_type)
        bound = c.kl_output_clamp_value
        return product if bound is None else min(max(product, -bound), bound)

    def _reduce(self, terms: list[list[float]]) -> float:
        if self.config.token_level_loss:
            return sum(map(sum, terms)) / sum(map(len, terms))
        return sum(sum(row) / len(row) for row in terms) / len(terms)


def _kl(log_ratio: float, kind: str) -> float:
    return {"k1": -log_ratio, "k2": log_ratio**2 / 2, "k3": math.exp(log_ratio) - 1 - log_ratio}[kind]


def _float64(values: object) -> np.ndarray:
    return values.detach().numpy().astype(float)  # type: ignore[attr-defined, no-any-return]
