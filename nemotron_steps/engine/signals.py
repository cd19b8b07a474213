"""Warning signs over the metrics of a run, each a documented rule.

    monitor = SignalMonitor(SignalThresholds(), reward_range=(0.0, 1.0))
    for signal in monitor.update(step, metrics): reporter.signal(signal.name, **signal.numbers)

A signal is raised once when its rule starts to hold, stays in `monitor.active` while it does, and may be raised again
after it has cleared. Manifests answer signals by name (`[[strategies]] signal = ...`); nothing here changes training.

Rules look at windows, not at single steps: one odd batch is no sign. A rule whose metrics a run does not log is never
raised. W is `window` steps; "the window" is the last W steps, "the start" the first W steps of the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from nemotron_steps.environments.base import JUDGE_UNAVAILABLE
from nemotron_steps.environments.judged.judging import JUDGE_UNPARSEABLE

MAX_HISTORY = 512
"""Steps kept per metric; rules look back much less far."""


@dataclass(frozen=True)
class Signal:
    """One raised warning, with the numbers that raised it."""

    name: str
    step: int
    numbers: dict[str, float]
    message: str


@dataclass(frozen=True)
class SignalThresholds:
    """Bounds of the rules. The defaults are far from what healthy runs of this project log."""

    window: int = 5
    """W, steps a rule averages over."""
    reward_saturated: float = 0.95
    """Share of the reward range that the mean reward has reached."""
    zero_std_share: float = 0.8
    """Share of groups without a difference in reward."""
    kl_spike_factor: float = 5.0
    """KL of a step against the median of the steps before."""
    kl_spike_floor: float = 0.05
    """KL, nats a token, below which no rise counts as a spike."""
    teacher_kl_stalled: float = 0.9
    """Divergence from the teachers in the window against the start."""
    teacher_kl_floor: float = 0.02
    """Divergence, nats a token, below which a policy is as its teachers."""
    entropy_collapse: float = 0.1
    """Entropy of the window against the start."""
    token_mult_prob_error: float = 1.05
    """Healthy generator and trainer stay below this (grpo metrics contract)."""
    gen_kl_error: float = 0.002
    """Likewise, nats a token."""
    truncation_rate: float = 0.2
    """Share of truncated samples."""
    judge_failures: float = 0.1
    """Share of rollouts that no judge could grade."""
    unread_comparisons: float = 0.2
    """Share of a judge's comparisons that could not be read."""
    failure_rate: float = 0.1
    """Share of rollouts without a reward, for whatever reason."""
    grad_norm_factor: float = 10.0
    """Gradient norm of a step against the median of the steps before."""
    masked_sequences: float = 0.1
    """Share of sequences dropped by the sequence logprob-error mask."""
    length_collapse: float = 0.25
    """Mean response length of the window against the start."""
    straggler_share: float = 0.1
    """Share of issued groups cut as stragglers."""


@dataclass
class History:
    """Values of one metric, oldest first: `start` keeps the first W for good, `values` the newest ones."""

    start: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def append(self, value: float, window: int) -> None:
        """Add the newest value."""
        if len(self.start) < window:
            self.start.append(value)
        self.values.append(value)
        del self.values[:-MAX_HISTORY]


Finding = tuple[dict[str, float], str]
"""Numbers, and a sentence that holds them."""


class SignalMonitor:
    """Watches the metrics of one run.

    Args:
        thresholds: bounds of the rules.
        reward_range: declared (lowest, highest) reward; None, or a bound that is not finite, takes the lowest and
            highest seen in the run.
        judge_failures: failure classes, as in `failures/<class>` metrics, that mean a judge did not answer, or not
            readably.
        max_policy_lag: `max_trajectory_age_steps` of an asynchronous run; None when lag has no bound.
    """

    def __init__(
        self,
        thresholds: SignalThresholds | None = None,
        *,
        reward_range: tuple[float, float] | None = None,
        judge_failures: tuple[str, ...] = (JUDGE_UNAVAILABLE, JUDGE_UNPARSEABLE),
        max_policy_lag: int | None = None,
    ) -> None:
        self.thresholds = thresholds or SignalThresholds()
        self.reward_range = reward_range
        self.judge_failures = judge_failures
        self.max_policy_lag = max_policy_lag
        self._history: dict[str, History] = {}
        self._active: dict[str, Signal] = {}
        self._latest: dict[str, float] = {}

    @property
    def active(self) -> dict[str, Signal]:
        """Signals whose rule holds now, with the numbers of when it began."""
        return dict(self._active)

    @property
    def metrics(self) -> tuple[str, ...]:
        """Every metric that any step has logged."""
        return tuple(self._history)

    def update(self, step: int, metrics: Mapping[str, float]) -> list[Signal]:
        """Take in the metrics of one step; returns the signals that begin with it."""
        self._latest = {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
        for name, value in self._latest.items():
            self._history.setdefault(name, History()).append(value, self.thresholds.window)
        raised: list[Signal] = []
        for name, rule in RULES.items():
            finding = rule(self)
            if finding is None:
                self._active.pop(name, None)
            elif name not in self._active:
                signal = Signal(name, step, *finding)
                self._active[name] = signal
                raised.append(signal)
        return raised

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state, so that a resumed run neither forgets its start nor repeats a signal."""
        return {
            "history": {name: [_to_json(h.start), _to_json(h.values)] for name, h in self._history.items()},
            "active": {s.name: [s.step, s.numbers, s.message] for s in self._active.values()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self._history = {name: History(_from_json(a), _from_json(b)) for name, (a, b) in state["history"].items()}
        self._active = {name: Signal(name, step, dict(n), text) for name, (step, n, text) in state["active"].items()}

    # -- what rules read --------------------------------------------------------------------------------------------

    def latest(self, name: str) -> float | None:
        """The metric in this step."""
        return self._latest.get(name)

    def window(self, name: str) -> list[float] | None:
        """The last W finite values, if this step logged the metric and there are that many."""
        if name not in self._latest:
            return None
        values = self._history[name].values[-self.thresholds.window :]
        return values if len(values) == self.thresholds.window and all(map(math.isfinite, values)) else None

    def start(self, name: str) -> list[float] | None:
        """The first W values, once the window no longer overlaps them."""
        history = self._history.get(name)
        if history is None or len(history.values) < 2 * self.thresholds.window:
            return None
        return history.start if all(map(math.isfinite, history.start)) else None

    def before(self, name: str) -> list[float] | None:
        """The finite values before this step, at most 4 W of them, if there are at least W."""
        if name not in self._latest:
            return None
        values = [v for v in self._history[name].values[:-1][-4 * self.thresholds.window :] if math.isfinite(v)]
        return values if len(values) >= self.thresholds.window else None

    def everything(self, name: str) -> list[float]:
        """All finite values kept."""
        history = self._history.get(name)
        return [v for v in [*history.start, *history.values] if math.isfinite(v)] if history else []


def reward_saturated(m: SignalMonitor) -> Finding | None:
    """The window's mean reward is above 95 % of the reward range: little is left to learn, or a judge is gamed."""
    window = m.window("reward/mean")
    if window is None:
        return None
    if m.reward_range is not None and all(map(math.isfinite, m.reward_range)):
        low, high = m.reward_range
    else:
        low = min(m.everything("reward/min"), default=0.0)
        high = max(m.everything("reward/max"), default=0.0)
    if high <= low:
        return None
    mean = fmean(window)
    if mean < low + m.thresholds.reward_saturated * (high - low):
        return None
    return {"reward_mean": mean, "reward_low": low, "reward_high": high}, (
        f"mean reward {mean:.3g} is at the top of its range [{low:.3g}, {high:.3g}]"
    )


def low_reward_variance(m: SignalMonitor) -> Finding | None:
    """At least 80 % of the window's groups have equal rewards throughout: they give no gradient."""
    window = m.window("groups/zero_std_share")
    if window is None or fmean(window) < m.thresholds.zero_std_share:
        return None
    share = fmean(window)
    return {"zero_std_share": share}, f"{share:.0%} of the prompt groups have no difference in reward"


def kl_spike(m: SignalMonitor) -> Finding | None:
    """KL is 5 times the median and twice the highest of the 10 or more steps before, and above 0.05 nats a token.

    The highest counts because every run starts at 0 and rises: growing steadily is no spike. In the first steps it
    may well grow severalfold a step, so they are not judged.
    """
    before, now = m.before("kl_penalty"), m.latest("kl_penalty")
    early = before is not None and len(before) < 2 * m.thresholds.window
    if before is not None and now is not None and math.isfinite(now) and (early or now <= 2 * max(before)):
        return None
    return _spike(m, "kl_penalty", m.thresholds.kl_spike_factor, m.thresholds.kl_spike_floor, "KL to the reference")


def teacher_kl_stalled(m: SignalMonitor) -> Finding | None:
    """After 20 steps the window's divergence from the teachers is above 90 % of the start's, and above 0.02 nats."""
    name = "teacher_divergence"
    start, window, before = m.start(name), m.window(name), m.before(name)
    if start is None or window is None or before is None or len(before) < 4 * m.thresholds.window:
        return None
    first, now = fmean(start), fmean(window)
    if now <= max(m.thresholds.teacher_kl_floor, m.thresholds.teacher_kl_stalled * first):
        return None
    return {"start": first, "now": now}, f"the divergence from the teachers is {now:.3g} nats a token, from {first:.3g}"


def entropy_collapse(m: SignalMonitor) -> Finding | None:
    """Entropy of the window is below 10 % of what it was at the start. Uses `entropy`, else `approx_entropy`."""
    name = "entropy" if m.latest("entropy") is not None else "approx_entropy"
    return _collapse(m, name, m.thresholds.entropy_collapse, "entropy")


def length_collapse(m: SignalMonitor) -> Finding | None:
    """Mean response length of the window is below 25 % of what it was at the start."""
    return _collapse(m, "response_length/mean", m.thresholds.length_collapse, "response length")


def logprob_drift(m: SignalMonitor) -> Finding | None:
    """Generator and trainer disagree: token_mult_prob_error above 1.05 or gen_kl_error above 0.002 (window median).

    A single step whose token_mult_prob_error is not finite, or above 2, is enough. Where rollouts lag behind the policy
    only that counts: the rest of their difference is the update between.
    """
    bounds = {
        "token_mult_prob_error": m.thresholds.token_mult_prob_error,
        "gen_kl_error": m.thresholds.gen_kl_error,
    }
    now = m.latest("token_mult_prob_error")
    if now is not None and not now <= 2.0:
        return {"token_mult_prob_error": now}, f"token_mult_prob_error is {now:.4g} (healthy below 1.05)"
    lags = m.window("policy_lag/mean")
    if lags is not None and max(lags) > 0:
        return None
    for name, bound in bounds.items():
        window = m.window(name)
        if window is not None and median(window) > bound:
            value = median(window)
            return {name: value, "bound": bound}, f"{name} is {value:.4g} (healthy below {bound})"
    return None


def truncation_high(m: SignalMonitor) -> Finding | None:
    """More than 20 % of the window's samples are truncated."""
    return _above(m, "truncation_rate", m.thresholds.truncation_rate, "of the samples are truncated")


def judge_unavailable(m: SignalMonitor) -> Finding | None:
    """More than 10 % of this step's rollouts have no reward because a judge did not answer, or not readably."""
    share = sum(m.latest(f"failures/{name}") or 0.0 for name in m.judge_failures)
    if share <= m.thresholds.judge_failures:
        return None
    return {"share": share}, f"{share:.1%} of the rollouts could not be judged"


def judge_unreadable(m: SignalMonitor) -> Finding | None:
    """More than 20 % of the window's comparisons could not be read and count as ties: rewards say little."""
    for name in m.metrics:
        if name.startswith("reward/") and name.endswith("/parse_failure_rate"):
            finding = _above(m, name, m.thresholds.unread_comparisons, "of the judge's comparisons could not be read")
            if finding is not None:
                return finding
    return None


def failures_high(m: SignalMonitor) -> Finding | None:
    """More than 10 % of the window's rollouts have no reward, whatever the reason."""
    return _above(m, "failure_rate", m.thresholds.failure_rate, "of the rollouts have no reward")


def grad_norm_spike(m: SignalMonitor) -> Finding | None:
    """The gradient norm is not finite, or 10 times the median of the steps before.

    Steps without a gradient, whose groups all had equal rewards, are no measure.
    """
    now, before = m.latest("grad_norm"), m.before("grad_norm")
    if now is not None and math.isfinite(now) and before is not None and not any(before):
        return None
    return _spike(m, "grad_norm", m.thresholds.grad_norm_factor, 0.0, "the gradient norm")


def sequences_masked(m: SignalMonitor) -> Finding | None:
    """More than 10 % of the window's sequences are dropped by the sequence logprob-error mask."""
    name = "seq_logprob_error/masked_share"
    return _above(m, name, m.thresholds.masked_sequences, "of the sequences are dropped for their logprob error")


def policy_lag_high(m: SignalMonitor) -> Finding | None:
    """A token older than max_trajectory_age_steps was trained on."""
    lag = m.latest("policy_lag/max")
    if m.max_policy_lag is None or lag is None or lag <= m.max_policy_lag:
        return None
    return {"policy_lag": lag, "bound": float(m.max_policy_lag)}, f"policy lag {lag:.0f} is above {m.max_policy_lag}"


def stragglers_high(m: SignalMonitor) -> Finding | None:
    """More than 10 % of the groups issued so far were cut as stragglers, whether tried again or used in part."""
    issued = m.latest("async/issued")
    if not issued:
        return None
    late = sum(m.latest(f"async/{name}") or 0.0 for name in ("withdrawn_straggler", "partial"))
    if late / issued <= m.thresholds.straggler_share:
        return None
    return {"share": late / issued}, f"{late / issued:.0%} of the groups missed the straggler deadline"


RULES: dict[str, Callable[[SignalMonitor], Finding | None]] = {
    rule.__name__: rule
    for rule in (
        reward_saturated,
        low_reward_variance,
        kl_spike,
        entropy_collapse,
        length_collapse,
        logprob_drift,
        truncation_high,
        judge_unavailable,
        judge_unreadable,
        failures_high,
        grad_norm_spike,
        sequences_masked,
        policy_lag_high,
        stragglers_high,
        teacher_kl_stalled,
    )
}
"""Every rule under its signal's name."""


def _to_json(values: list[float]) -> list[float | None]:
    """JSON has no NaN or infinity."""
    return [value if math.isfinite(value) else None for value in values]


def _from_json(values: list[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in values]


def _above(m: SignalMonitor, name: str, bound: float, what: str) -> Finding | None:
    window = m.window(name)
    if window is None or fmean(window) <= bound:
        return None
    value = fmean(window)
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
    window, start = m.window(name), m.start(name)
    if window is None or start is None:
        return None
    now, then = fmean(window), fmean(start)
    if then <= 0 or now >= share * then:
        return None
    return {"now": now, "start": then}, f"{what} fell from {then:.3g} to {now:.3g}"
