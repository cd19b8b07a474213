import json
import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from nemotron_steps.cli.catalog import explained_signals
from nemotron_steps.config.schema.rl import SignalsConfig
from nemotron_steps.engine.signals import RULES, Signal, SignalMonitor

Metrics = dict[str, float]


def healthy(step: int, rng: random.Random) -> Metrics:
    """What a run that goes well logs: reward rises from .2 to .8, KL and entropy drift slowly, everything is noisy."""
    along = min(step / 100, 1.0)

    def noisy(value: float, share: float = 0.1) -> float:
        return value * (1 + share * rng.uniform(-1, 1))

    return {
        "reward/mean": noisy(0.2 + 0.6 * along),
        "reward/min": 0.0,
        "reward/max": 1.0,
        "reward/std": 0.45,
        "groups/count": 16.0,
        "lr": 3e-6,
        "num_valid_tokens": noisy(2000),
        "loss": rng.uniform(-0.05, 0.05),
        "actor_loss": 0.0,
        "groups/zero_std_share": noisy(0.2 + 0.2 * along),
        "kl_penalty": noisy(0.002 + 0.06 * along, 0.3),
        "entropy": noisy(1.2 - 0.7 * along),
        "response_length/mean": noisy(300 + 100 * along),
        "token_mult_prob_error": 1.0 + noisy(0.01),
        "gen_kl_error": noisy(0.0003, 0.5),
        "truncation_rate": noisy(0.05, 0.5),
        "reward/genrm_compare/parse_failure_rate": noisy(0.02, 0.5),
        "failure_rate": rng.choice([0.0, 0.0, 0.005]),
        "grad_norm": noisy(0.5, 0.6),
        "seq_logprob_error/masked_share": rng.choice([0.0, 0.0, 0.01]),
        "policy_lag/max": 1.0,
        "failures/straggler": noisy(0.01, 0.5),
    }


def run(change: Callable[[int, Metrics], None], steps: int = 60, seed: int = 0, **options: object) -> list[Signal]:
    monitor = SignalMonitor(max_policy_lag=1, **options)  # type: ignore[arg-type]
    rng = random.Random(seed)
    raised: list[Signal] = []
    for step in range(steps):
        metrics = healthy(step, rng)
        change(step, metrics)
        raised += monitor.update(step, metrics)
    return raised


@pytest.mark.parametrize("seed", range(20))
def test_healthy_runs_raise_nothing(seed: int) -> None:
    assert run(lambda step, m: None, steps=150, seed=seed) == []
    assert run(lambda step, m: None, steps=150, seed=seed, reward_range=(0.0, 1.0)) == []


def after(start: int, **values: float) -> Callable[[int, Metrics], None]:
    def change(step: int, metrics: Metrics) -> None:
        if step >= start:
            metrics.update({name.replace("__", "/"): value for name, value in values.items()})

    return change


def from_the_first(**values: float) -> Callable[[int, Metrics], None]:
    return after(0, **values)


PROVOKE: dict[str, Callable[[int, Metrics], None]] = {
    "policy_collapse": after(30, reward__mean=0.02, entropy=3.0),
    "answers_never_end": from_the_first(truncation_rate=0.97),
    "samples_at_random": from_the_first(approx_entropy=5.0),
    "nothing_trained": after(30, num_valid_tokens=0.0, overlong_filtered_share=1.0),
    "kl_dominates": after(30, loss=1.0),
    "reward_saturated": after(30, reward__mean=0.97),
    "low_reward_variance": after(30, groups__zero_std_share=0.9),
    "kl_spike": lambda step, m: m.update(kl_penalty=2.0) if step == 40 else None,
    "entropy_collapse": after(30, entropy=0.02),
    "length_collapse": after(30, response_length__mean=40.0),
    "logprob_drift": after(30, token_mult_prob_error=1.08),
    "truncation_high": after(30, truncation_rate=0.4),
    "judge_unavailable": after(30, failures__judge_unavailable=0.5),
    "judge_unreadable": after(30, reward__genrm_compare__parse_failure_rate=0.4),
    "failures_high": after(30, failure_rate=0.3),
    "grad_norm_spike": lambda step, m: m.update(grad_norm=30.0) if step == 40 else None,
    "sequences_masked": after(30, **{"seq_logprob_error__masked_share": 0.3}),
    "policy_lag_high": after(30, policy_lag__max=2.0),
    "teacher_kl_stalled": lambda step, m: m.update(teacher_divergence=0.5) if step >= 10 else None,
    "stragglers_high": after(30, failures__straggler=0.3),
}


def test_every_rule_is_provoked_below_and_can_stop_a_run() -> None:
    assert set(PROVOKE) == set(RULES) == set(SignalsConfig(stop_on=tuple(RULES)).stop_on)
    names = list(RULES)
    assert all(names.index(cause) < names.index(name) for name, rule in RULES.items() for cause in rule.symptom_of)


@pytest.mark.parametrize("name", sorted(PROVOKE))
def test_each_signal_is_raised_once_soon_and_alone(name: str) -> None:
    raised = run(PROVOKE[name])
    assert [signal.name for signal in raised] == [name]
    signal = raised[0]
    assert (30 <= signal.step <= 40) if name not in ("answers_never_end", "samples_at_random") else signal.step == 1
    assert signal.numbers and all(math.isfinite(value) for value in signal.numbers.values())
    assert signal.message


def at(step: int, **values: float) -> Callable[[int, Metrics], None]:
    return lambda now, m: m.update({k.replace("__", "/"): v for k, v in values.items()}) if now == step else None


KL = (0.0, 0.0006, 0.0043, 0.0257, 0.0405, 0.1013, 0.2042)
CHANGES: dict[str, tuple[Callable[[int, Metrics], None], list[tuple[str, int]]]] = {
    "unreadable judges count as silent ones": (
        after(30, failures__judge_unavailable=0.06, failures__judge_unparseable=0.06),
        [("judge_unavailable", 30)],
    ),
    "KL leaps from 0 in the first steps": (lambda step, m: m.update(kl_penalty=KL[step] if step < 7 else 0.25), []),
    "a gradient after steps without one": (
        lambda step, m: m.update(grad_norm=30.0 if step == 45 else m["grad_norm"] * (step % 5 == 0)),
        [("grad_norm_spike", 45)],
    ),
    "rollouts of older weights, once far off": (
        lambda step, m: m.update({"policy_lag/mean": 0.9, "token_mult_prob_error": 2.5 if step == 45 else 1.2}),
        [("logprob_drift", 45)],
    ),
    "one odd step": (at(40, truncation_rate=0.5, entropy=0.01, token_mult_prob_error=1.5, reward__mean=0.99), []),
    "a signal clears and returns": (
        lambda step, m: m.update(truncation_rate=0.9) if 20 <= step < 30 or step >= 45 else None,
        [("truncation_high", 20), ("truncation_high", 45)],
    ),
    "the estimate stands in for the entropy": (
        lambda step, m: m.update(approx_entropy=m.pop("entropy") if step < 30 else 0.01 * m.pop("entropy")),
        [("entropy_collapse", 34)],
    ),
}


@pytest.mark.parametrize(("change", "expected"), CHANGES.values(), ids=CHANGES)
def test_what_is_a_sign_and_what_is_none(
    change: Callable[[int, Metrics], None], expected: list[tuple[str, int]]
) -> None:
    assert [(signal.name, signal.step) for signal in run(change)] == expected


def test_a_resumed_monitor_neither_forgets_nor_repeats() -> None:
    rng = random.Random(0)
    first = SignalMonitor(max_policy_lag=1)
    for step in range(40):
        metrics = healthy(step, rng)
        PROVOKE["entropy_collapse"](step, metrics)
        first.update(step, metrics)
    first.update(40, {**healthy(40, rng), "entropy": 0.02, "unrelated": math.nan})
    state = json.loads(json.dumps(first.state_dict(), allow_nan=False))
    second = SignalMonitor(max_policy_lag=1)
    second.load_state_dict(state)
    assert second.active == first.active and set(second.active) == {"entropy_collapse"}
    assert second.update(41, {**healthy(41, rng), "entropy": 0.02}) == []
    assert set(second.active) == {"entropy_collapse"}  # which takes the start and the window


@pytest.mark.parametrize(
    ("before", "now", "stops"),
    [
        ((), ("truncation_high",), "truncation_high"),  # added to what holds already
        ((), ("low_reward_variance",), "low_reward_variance"),  # and to what another signal explains
        (("truncation_high",), ("truncation_high", "kl_spike"), None),  # it has ended the run, which goes on
        (("truncation_high",), (), None),
    ],
)
def test_a_signal_that_holds_ends_the_run_that_is_to_stop_on_it_once(
    before: tuple[str, ...], now: tuple[str, ...], stops: str | None
) -> None:
    cut_off = {"truncation_rate": 0.8, "groups/zero_std_share": 0.9, "approx_entropy": 5.0}
    cut_off = {name: value for name, value in cut_off.items() if stops == "low_reward_variance" or "approx" not in name}
    first, second = SignalMonitor(stop_on=before), SignalMonitor(stop_on=now)
    for step in range(10):
        first.update(step, cut_off)
    assert (first.stopping and first.stopping.name) == (before[0] if before else None)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    second.update(10, cut_off)
    assert (second.stopping and second.stopping.name) == stops
    if before == now[:1]:
        for step in range(11, 30):  # it clears, and returns
            second.update(step, {**cut_off, "truncation_rate": 0.0 if step < 20 else 0.8})
        assert second.stopping is not None


def test_the_documentation_lists_exactly_these_rules() -> None:
    text = (Path(__file__).parents[2] / "docs" / "signals.md").read_text().partition("\n## ")[0]
    table = dict(line.strip("| ").split(" | ", 1) for line in text.splitlines() if line.startswith("| `"))
    assert table == {f"`{name}`": explained_signals()[name]["cause"] for name in RULES}


def steady(values: list[Metrics], **options: object) -> set[str]:
    """Signals that hold after these steps."""
    monitor = SignalMonitor(**options)  # type: ignore[arg-type]
    for step, metrics in enumerate(values):
        monitor.update(step, metrics)
    return set(monitor.active)


@pytest.mark.parametrize(
    ("name", "metric", "quiet", "loud"),
    [
        ("low_reward_variance", "groups/zero_std_share", 0.79, 0.8),
        ("truncation_high", "truncation_rate", 0.2, 0.21),
        ("judge_unavailable", "failures/judge_unavailable", 0.1, 0.11),
        ("logprob_drift", "token_mult_prob_error", 1.05, 1.051),
        ("logprob_drift", "gen_kl_error", 0.002, 0.0021),
        ("policy_lag_high", "policy_lag/max", 2.0, 3.0),
        ("grad_norm_spike", "grad_norm", 1e3, math.nan),
    ],
)
def test_a_bound_is_the_last_healthy_value(name: str, metric: str, quiet: float, loud: float) -> None:
    for value, expected in ((quiet, set()), (loud, {name})):
        assert steady([{metric: value}] * 5, max_policy_lag=2) == expected
    if name not in ("judge_unavailable", "policy_lag_high", "grad_norm_spike"):
        assert steady([{metric: loud}] * 4) == set()  # a window is five steps
        assert steady([{metric: loud}] * 5 + [{}]) == set()  # this step does not log it


@pytest.mark.parametrize(
    ("name", "steps", "raised"),
    [
        ("kl_spike", [{"kl_penalty": 0.01}] * 7 + [{"kl_penalty": math.nan}], True),
        ("kl_spike", [{"kl_penalty": 1.0}] + [{"kl_penalty": 0.01}] * 19 + [{"kl_penalty": 0.06}], False),
        ("entropy_collapse", [{"entropy": 1.0}] * 5 + [{"entropy": 0.099}] * 5, True),
        ("kl_spike", [{"kl_penalty": 0.01}] * 10 + [{"kl_penalty": 0.051}], True),
        ("logprob_drift", [{"token_mult_prob_error": 2.01}], True),
        ("logprob_drift", [{"token_mult_prob_error": 1.5, "policy_lag/mean": 0.1}] * 5, False),
        ("kl_dominates", [{"loss": -9.5, "actor_loss": -10.0, "kl_penalty": 0.5, "advantages/std": 30.0}] * 2, False),
        ("kl_dominates", [{"loss": 0.5, "actor_loss": 0.0, "kl_penalty": 0.5, "advantages/std": 0.1}] * 2, True),
        ("teacher_kl_stalled", [{"teacher_divergence": 1.0}] * 21, True),
        ("teacher_kl_stalled", [{"teacher_divergence": 1.0}] * 16 + [{"teacher_divergence": 0.91}] * 5, True),
    ],
)
def test_a_rule_holds_from_its_bound_on(name: str, steps: list[Metrics], raised: bool) -> None:
    assert steady(steps, reward_range=(0.0, 2.0)) == ({name} if raised else set())


# What the run or the case is | signals and their steps | a metric | its values, step by step. The first eight are as
# `rl/nemo_rl/rlvr -c tiny` logged them (docs/signals.md).
FIRST_STEPS = """
lr=0.05 | policy_collapse 2 | reward/mean | .422 .051 .072 .080 .035 .037 .103 .067 .071 .069
lr=0.05 | policy_collapse 2 | entropy | .400 1.286 .523 .285 .256 .201 .187 .278 .158 .220
lr=0.05 | policy_collapse 2 | truncation_rate | 0 0 1 1 1 1 1 1 1 1
lr=0.02 | policy_collapse 4 | reward/mean | .422 .303 .105 .100 .065 .002 .081 .049 .020 .010
lr=0.02 | policy_collapse 4 | entropy | .400 .800 2.066 1.054 .838 .686 .573 .343 .427 .232
lr=0.02 | policy_collapse 4 | truncation_rate | 0 .008 .617 .172 .492 0 0 .031 0 0
16 updates a step, no clip | policy_collapse 2 | reward/mean | .422 .046 .026 .036 .017 .040
16 updates a step, no clip | policy_collapse 2 | truncation_rate | 0 .625 .992 .992 1 1
KL penalty 1000 | kl_dominates 3 | kl_penalty | 0 .0005 .0008 .0014
KL penalty 1000 | kl_dominates 3 | loss | -.004 .586 .846 1.527
KL penalty 1000 | kl_dominates 3 | actor_loss | -.004 .047 -.002 .138
max_new_tokens=3 | answers_never_end 2 | truncation_rate | 1 1 1 .992 1
max_new_tokens=3 | answers_never_end 2 | num_valid_tokens | 0 0 0 3 0
seq_logprob_error_threshold=0.5 | nothing_trained 2 | num_valid_tokens | 0 0 0 0 0 0
seq_logprob_error_threshold=0.5 | nothing_trained 2 | seq_logprob_error/masked_share | 1 1 1 1 1 1
temperature=5 | samples_at_random 2 | approx_entropy | 5.4 5.5 5.4 5.5 5.4
temperature=5 | samples_at_random 2 | truncation_rate | .80 .77 .78 .79 .76
a hard task | | reward/mean | 0 0 0 0 0 0 0 0 0 0
a hard task | | entropy | 1 .4 2.5 1 .4 2.5 1 .4 2.5 .3
harder rows for once | | reward/mean | .5 .52 .02 .5 .48
harder rows for once | | entropy | 1 1 1.1 .9 .9
a change that costs nothing | | reward/mean | .4 .45 .5 .6
a change that costs nothing | | response_length/mean | 9 30 90 300
one prompt a step | | reward/mean | 1 0 1 0 0
one prompt a step | | entropy | 1 3 .5 4 .2
one prompt a step | | groups/count | 1 1 1 1 1
"""
ROWS = [[cell.strip() for cell in line.split("|")] for line in FIRST_STEPS.strip().splitlines()]


@pytest.mark.parametrize("case", dict.fromkeys(row[0] for row in ROWS))
def test_a_run_that_breaks_in_its_first_steps_is_told_soon_with_its_cause_alone_and_no_other_is(case: str) -> None:
    expected = next(row[1] for row in ROWS if row[0] == case)
    series = {row[2]: [float(value) for value in row[3].split()] for row in ROWS if row[0] == case}
    monitor = SignalMonitor(reward_range=(0.0, 1.0))
    raised = []
    for step, values in enumerate(zip(*series.values(), strict=True), start=1):
        metrics = {"reward/std": 0.467, "groups/count": 16.0} | dict(zip(series, values, strict=True))
        raised += [f"{signal.name} {signal.step}" for signal in monitor.update(step, metrics)]
    assert " ".join(raised) == expected
