"""Warning signs over the metrics of a run, as a table of rules. Nothing here changes training: manifests answer signals
by name (`[[strategies]] signal = ...`), docs/signals.md says when each is raised.

A signal is raised once when its rule starts to hold, and again after it has cleared; not while one that explains it
holds. A rule whose metrics a run does not log is never raised. W is `WINDOW` steps; "the window" is the last W steps,
"the start" the first W.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from nemotron_steps.environments.base import JUDGE_UNAVAILABLE
from nemotron_steps.environments.judged.judging import JUDGE_UNPARSEABLE

MAX_HISTORY = 512
"""Steps kept per metric; rules look back much less far."""
WINDOW = 5
"""W, steps a rule averages over."""


@dataclass(frozen=True)
class Signal:
    """One raised warning, with the numbers that raised it."""

    name: str
    step: int
    numbers: dict[str, float]
    message: str


Finding = tuple[dict[str, float], str]
"""Numbers, and a sentence that holds them."""
Check = Callable[["SignalMonitor"], Finding | None]


class SignalMonitor:
    """Watches the metrics of one run."""

    def __init__(
        self,
        *,
        reward_range: tuple[float, float] | None = None,
        max_policy_lag: int | None = None,
        stop_on: Collection[str] = (),
    ) -> None:
        self.reward_range = reward_range
        self.max_policy_lag = max_policy_lag
        self.stop_on = stop_on
        self._passed: set[str] = set()  # held when the run was resumed, and were in stop_on before
        self._start: dict[str, list[float]] = {}
        self._values: dict[str, list[float]] = {}
        """Of each metric the first W values, and the newest ones, oldest first."""
        self.active: dict[str, Signal] = {}
        """Signals whose rule holds now, with the numbers of when it began."""
        self._latest: dict[str, float] = {}

    @property
    def stopping(self) -> Signal | None:
        """The first signal of `stop_on` that holds; a run that it has ended goes on, once resumed, until it clears."""
        ending = (signal for name, signal in self.active.items() if name in self.stop_on and name not in self._passed)
        return next(ending, None)

    @property
    def metrics(self) -> tuple[str, ...]:
        """Every metric that any step has logged."""
        return tuple(self._values)

    def update(self, step: int, metrics: Mapping[str, float]) -> list[Signal]:
        """Take in the metrics of one step; returns the signals that begin with it."""
        self._latest = {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
        for name, value in self._latest.items():
            start = self._start.setdefault(name, [])
            if len(start) < WINDOW:
                start.append(value)
            self._values[name] = [*self._values.get(name, [])[1 - MAX_HISTORY :], value]
        raised: list[Signal] = []
        for name, rule in RULES.items():
            finding = rule.check(self)
            if finding is None:
                self.active.pop(name, None)
            elif name not in self.active and (name in self.stop_on or self.active.keys().isdisjoint(rule.symptom_of)):
                raised.append(Signal(name, step, *finding))
                self.active[name] = raised[-1]
        self._passed &= self.active.keys()
        return raised

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state, so that a resumed run neither forgets its start nor repeats a signal."""

        def finite(values: Sequence[float]) -> list[float | None]:  # JSON has no NaN or infinity
            return [value if math.isfinite(value) else None for value in values]

        return {
            "history": {name: [finite(self._start[name]), finite(kept)] for name, kept in self._values.items()},
            "active": {s.name: [s.step, s.numbers, s.message] for s in self.active.values()},
            "stop_on": list(self.stop_on),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`."""
        for name, (start, values) in state["history"].items():
            self._start[name], self._values[name] = (
                [math.nan if value is None else value for value in kept] for kept in (start, values)
            )
        self.active = {name: Signal(name, step, dict(n), text) for name, (step, n, text) in state["active"].items()}
        self._passed = self.active.keys() & set(state.get("stop_on", ()))

    # -- what rules read --------------------------------------------------------------------------------------------

    def latest(self, name: str) -> float | None:
        """The metric in this step."""
        return self._latest.get(name)

    def last(self, name: str, count: int) -> list[float] | None:
        """The last `count` values, if this step logged the metric and there are that many, all finite."""
        values = self._values[name][-count:] if name in self._latest else []
        return values if len(values) == count and all(map(math.isfinite, values)) else None

    def mean(self, name: str) -> float | None:
        """Of the window."""
        window = self.last(name, WINDOW)
        return fmean(window) if window is not None else None

    def start(self, name: str) -> list[float] | None:
        """The first W values, once the window no longer overlaps them."""
        if len(self._values.get(name, ())) < 2 * WINDOW:
            return None
        return self._start[name] if all(map(math.isfinite, self._start[name])) else None

    def before(self, name: str, least: int = WINDOW, most: int = 4 * WINDOW) -> list[float] | None:
        """The finite values before this step, at most so many of them, if there are at least so many."""
        if name not in self._latest:
            return None
        values = [v for v in self._values[name][:-1][-most:] if math.isfinite(v)]
        return values if len(values) >= least else None

    def earlier(self, name: str) -> list[float]:
        """Of the 4 W finite values before this step all but the newest W, and the first at least: what a metric was
        before a fall that took W steps. One value may be luck, and the best of a run always is."""
        values = self.before(name, 1) or []
        return values[: max(1, len(values) - WINDOW)]

    def everything(self, name: str) -> list[float]:
        """All finite values kept."""
        kept = [*self._start.get(name, ()), *self._values.get(name, ())]
        return [value for value in kept if math.isfinite(value)]

    @property
    def entropy(self) -> str:
        """The metric that is logged, if not the exact one then its estimate."""
        return "entropy" if "entropy" in self._latest else "approx_entropy"

    @property
    def rewards(self) -> tuple[float, float]:
        """The declared (lowest, highest) reward, or those of the run so far."""
        if self.reward_range is not None and all(map(math.isfinite, self.reward_range)):
            return self.reward_range
        low, high = min(self.everything("reward/min"), default=0.0), max(self.everything("reward/max"), default=0.0)
        return low, high


def _policy_collapse(m: SignalMonitor) -> Finding | None:
    """Both the fall and the change are measured from `earlier` steps; the error is that of a step's mean over prompt
    groups. Harder prompts get longer answers as well: their length alone does not show a changed policy."""
    name, active = "reward/mean", m.active.get("policy_collapse")
    now, before = m.latest(name), m.earlier(name)
    low, groups = m.rewards[0], m.latest("groups/count") or 0.0
    if now is None or not math.isfinite(now) or not before or groups < 4:  # fewer say nothing
        return None
    usual = active.numbers["before"] if active is not None else fmean(before)
    error = max(m.everything("reward/std"), default=0.0) / math.sqrt(groups)
    falls = [usual - value for value in (m.last(name, 2) or [now])]
    lost = now < low + (usual - low) / 2
    if lost and active is not None:
        return active.numbers, active.message
    if not lost or not (falls[-1] > 3 * error or (len(falls) == 2 and min(falls) > 2 * error)):
        return None
    changed = list(_changes(m))
    if all(what == "length" for what, _, _ in changed):
        return None
    rate = m.latest("lr")
    told = ", ".join(f"{what} {then:.3g} → {value:.3g}" for what, then, value in changed)
    numbers = {"reward": now, "before": usual, **{what.replace(" ", "_"): value for what, _, value in changed}}
    return numbers | ({} if rate is None else {"lr": rate}), (
        f"reward fell from {usual:.3g} to {now:.3g} as the policy changed ({told})"
        + ("" if rate is None else f" at a learning rate of {rate:.3g}")
    )


def _changes(m: SignalMonitor) -> Iterator[tuple[str, float, float]]:
    """What of a policy is as it was in none of the `earlier` steps, be they of other data: (what, before, now)."""
    for name, what, factor, added in (
        (m.entropy, "entropy", 2.0, 0.0),
        ("response_length/mean", "length", 1.5, 0.0),
        ("truncation_rate", "truncated share", 1.0, 0.3),
        ("kl_penalty", "KL", 1.0, 0.5),
    ):
        now, before = m.latest(name), m.earlier(name)
        if now is None or not before:
            continue
        if now > factor * max(before) + added or (factor > 1 and now < min(before) / factor):
            yield what, median(before), now


def _always(name: str, bound: float, key: str, text: str) -> Check:
    """At or above a bound in every step since the first."""

    def check(m: SignalMonitor) -> Finding | None:
        values = m.last(name, 2)
        if values is None or min(m.everything(name)) < bound:
            return None
        return {key: values[-1]}, text.format(values[-1])

    return check


def _nothing_trained(m: SignalMonitor) -> Finding | None:
    if m.last("num_valid_tokens", 2) != [0.0, 0.0]:
        return None
    shares = {
        "overlong filter": m.latest("overlong_filtered_share"),
        "sequence logprob-error mask": m.latest("seq_logprob_error/masked_share"),
        "epsilon filter": m.latest("epsilon_filtering/dropped_share"),
        "failed rollouts": m.latest("failure_rate"),
    }
    found = {what: share for what, share in shares.items() if share}
    told = f" ({', '.join(f'{what} {share:.0%}' for what, share in found.items())})" if found else ""
    return {what.replace(" ", "_"): share for what, share in found.items()}, f"no token was trained on{told}"


def _kl_dominates(m: SignalMonitor) -> Finding | None:
    losses, actors = m.last("loss", 2), m.last("actor_loss", 2)
    if losses is None or actors is None or m.latest("kl_penalty") is None:
        return None
    terms = [loss - actor for loss, actor in zip(losses, actors, strict=True)]
    scale = max(1.0, m.latest("advantages/std") or 0.0)  # of rewards that are not normalised
    if not min(terms) >= 0.3 * scale:
        return None
    return {"kl_term": terms[-1]}, f"the KL penalty is {terms[-1]:.3g} of the loss, advantages are about {scale:.3g}"


def _reward_saturated(m: SignalMonitor) -> Finding | None:
    mean, (low, high) = m.mean("reward/mean"), m.rewards
    if mean is None or high <= low or mean < low + 0.95 * (high - low):
        return None
    return {"reward_mean": mean, "reward_low": low, "reward_high": high}, (
        f"mean reward {mean:.3g} is at the top of its range [{low:.3g}, {high:.3g}]"
    )


def _low_reward_variance(m: SignalMonitor) -> Finding | None:
    share = m.mean("groups/zero_std_share")
    if share is None or share < 0.8:
        return None
    return {"zero_std_share": share}, f"{share:.0%} of the prompt groups have no difference in reward"


def _kl_spike(m: SignalMonitor) -> Finding | None:
    """The highest counts because every run starts at 0 and rises: steady growth is not a spike. In the first steps it
    may well grow severalfold a step, so they are not judged."""
    before, now = m.before("kl_penalty"), m.latest("kl_penalty")
    early = before is not None and len(before) < 2 * WINDOW
    if before is not None and now is not None and math.isfinite(now) and (early or now <= 2 * max(before)):
        return None
    return _spike(m, "kl_penalty", 5.0, 0.05, "KL to the reference")


def _teacher_kl_stalled(m: SignalMonitor) -> Finding | None:
    name = "teacher_divergence"
    start, now, before = m.start(name), m.mean(name), m.before(name, 4 * WINDOW)
    if start is None or now is None or before is None or now <= max(0.02, 0.9 * fmean(start)):
        return None
    first = fmean(start)
    return {"start": first, "now": now}, f"the divergence from the teachers is {now:.3g} nats a token, from {first:.3g}"


def _logprob_drift(m: SignalMonitor) -> Finding | None:
    """One step whose token_mult_prob_error is not finite, or above 2, is enough. Where rollouts lag behind the policy
    only that counts: the rest of their difference is the update between."""
    now = m.latest("token_mult_prob_error")
    if now is not None and not now <= 2.0:
        return {"token_mult_prob_error": now}, f"token_mult_prob_error is {now:.4g} (healthy below 1.05)"
    lags = m.last("policy_lag/mean", WINDOW)
    for name, bound in {"token_mult_prob_error": 1.05, "gen_kl_error": 0.002}.items():
        window = m.last(name, WINDOW) if lags is None or max(lags) <= 0 else None
        if window is not None and median(window) > bound:
            value = median(window)
            return {name: value, "bound": bound}, f"{name} is {value:.4g} (healthy below {bound})"
    return None


def _failing(names: tuple[str, ...], what: str) -> Check:
    """More than a tenth of the rollouts since the last step failed so."""

    def check(m: SignalMonitor) -> Finding | None:
        share = sum(m.latest(f"failures/{name}") or 0.0 for name in names)
        return ({"share": share}, f"{share:.1%} of the rollouts {what}") if share > 0.1 else None

    return check


def _judge_unreadable(m: SignalMonitor) -> Finding | None:
    names = (n for n in m.metrics if n.startswith("reward/") and n.endswith("/parse_failure_rate"))
    found = (_above(m, name, 0.2, "of the judge's comparisons could not be read") for name in names)
    return next(filter(None, found), None)


def _grad_norm_spike(m: SignalMonitor) -> Finding | None:
    """Steps without a gradient, whose groups all had equal rewards, do not count."""
    now, before = m.latest("grad_norm"), m.before("grad_norm")
    if now is not None and math.isfinite(now) and before is not None and not any(before):
        return None
    return _spike(m, "grad_norm", 10.0, 0.0, "the gradient norm")


def _policy_lag_high(m: SignalMonitor) -> Finding | None:
    lag = m.latest("policy_lag/max")
    if m.max_policy_lag is None or lag is None or lag <= m.max_policy_lag:
        return None
    return {"policy_lag": lag, "bound": float(m.max_policy_lag)}, f"policy lag {lag:.0f} is above {m.max_policy_lag}"


@dataclass(frozen=True)
class Rule:
    """When a signal is raised; in words: nemotron_steps/errors/signals.toml and docs/signals.md."""

    check: Check
    symptom_of: tuple[str, ...] = ()


def _high(name: str, bound: float, what: str) -> Check:
    return lambda m: _above(m, name, bound, what)


_AT_ONCE = ("policy_collapse", "answers_never_end", "samples_at_random")
RULES: dict[str, Rule] = {
    "policy_collapse": Rule(_policy_collapse),
    "answers_never_end": Rule(
        _always("truncation_rate", 0.9, "truncation_rate", "{:.0%} of the answers are cut off since the first step")
    ),
    "samples_at_random": Rule(
        _always("approx_entropy", 3.0, "entropy", "answers are sampled nearly at random: entropy {:.3g} nats a token")
    ),
    "nothing_trained": Rule(_nothing_trained, _AT_ONCE),
    "kl_dominates": Rule(_kl_dominates, _AT_ONCE),
    "reward_saturated": Rule(_reward_saturated),
    "low_reward_variance": Rule(_low_reward_variance, _AT_ONCE),
    "kl_spike": Rule(_kl_spike, _AT_ONCE),
    "entropy_collapse": Rule(lambda m: _collapse(m, m.entropy, 0.1, "entropy"), _AT_ONCE),
    "length_collapse": Rule(lambda m: _collapse(m, "response_length/mean", 0.25, "response length"), _AT_ONCE),
    "logprob_drift": Rule(_logprob_drift),
    "truncation_high": Rule(_high("truncation_rate", 0.2, "of the samples are truncated"), _AT_ONCE),
    "judge_unavailable": Rule(_failing((JUDGE_UNAVAILABLE, JUDGE_UNPARSEABLE), "could not be judged")),
    "judge_unreadable": Rule(_judge_unreadable),
    "failures_high": Rule(_high("failure_rate", 0.1, "of the rollouts have no reward")),
    "grad_norm_spike": Rule(_grad_norm_spike, ("policy_collapse", "kl_dominates")),
    "sequences_masked": Rule(
        _high("seq_logprob_error/masked_share", 0.1, "of the sequences are dropped for their logprob error"),
        ("nothing_trained",),
    ),
    "policy_lag_high": Rule(_policy_lag_high),
    "teacher_kl_stalled": Rule(_teacher_kl_stalled),
    "stragglers_high": Rule(_failing(("straggler",), "were not over by their deadline")),
}
"""Every rule under its signal's name, causes before their symptoms."""


def _above(m: SignalMonitor, name: str, bound: float, what: str) -> Finding | None:
    value = m.mean(name)
    if value is None or value <= bound:
        return None
    return {name.rsplit("/", 1)[-1]: value, "bound": bound}, f"{value:.1%} {what}"


def _spike(m: SignalMonitor, name: str, factor: float, floor: float, what: str) -> Finding | None:
    now = m.latest(name)
    if now is None:
        return None
    if not math.isfinite(now):
        return {name: now}, f"{what} is {now}"
    before = m.before(name)
    typical = median([value for value in before if value != 0] or [0.0]) if before is not None else math.inf
    if now <= floor or now <= factor * typical:
        return None
    return {name: now, "typical": typical}, f"{what} is {now:.3g}, typically {typical:.3g} before"


def _collapse(m: SignalMonitor, name: str, share: float, what: str) -> Finding | None:
    now, start = m.mean(name), m.start(name)
    if now is None or start is None:
        return None
    then = fmean(start)
    if then <= 0 or now >= share * then:
        return None
    return {"now": now, "start": then}, f"{what} fell from {then:.3g} to {now:.3g}"
