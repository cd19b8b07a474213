"""What a step's rollouts say before training: rewards per environment, truncation, failures, lengths, policy lag.

Metrics of the loss are in losses/loss.py; warning signs over the history of both are in signals.py.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import fmean

import torch

from nemotron_steps.engine.grpo.rewards import REWARD_PENALTIES_KEY, RewardPenalty
from nemotron_steps.engine.types import Rollout
from nemotron_steps.environments.base import GRADER_FAILED


def rollout_metrics(
    rollouts: Sequence[Rollout], rewards: torch.Tensor, untrained: Sequence[str | None], version: int
) -> dict[str, float]:
    """All of them but group_metrics; arguments as theirs."""
    return {
        **reward_metrics(rollouts, rewards),
        **component_metrics(rollouts),
        **completion_metrics(rollouts, untrained),
        **environment_metrics(rollouts),
        **reward_penalty_metrics(rollouts),
        **policy_lag_metrics(rollouts, version),
    }


def oldest_version(rollouts: Sequence[Rollout], default: int) -> int:
    """Oldest weights that sampled any token of these rollouts; `default` when none was sampled."""
    return min((min(r.weight_versions) for r in rollouts if r.weight_versions), default=default)


def policy_lag_metrics(rollouts: Sequence[Rollout], version: int) -> dict[str, float]:
    """Histogram of policy lag over sampled tokens, as shares: `policy_lag/share_<k>`, with mean and maximum."""
    counts: Counter[int] = Counter()
    for rollout in rollouts:
        # Few distinct versions and very many tokens: count each instead of walking the list in Python.
        for sampled in set(rollout.weight_versions):
            counts[version - sampled] += rollout.weight_versions.count(sampled)
    total = sum(counts.values())
    if not total:
        return {}
    metrics = {f"policy_lag/share_{lag}": counts[lag] / total for lag in sorted(counts)}
    metrics["policy_lag/mean"] = sum(lag * n for lag, n in counts.items()) / total
    metrics["policy_lag/max"] = float(max(counts))
    return metrics


def reward_metrics(rollouts: Sequence[Rollout], rewards: torch.Tensor) -> dict[str, float]:
    """Mean, std, minimum and maximum reward of graded rollouts, over the step and per environment."""
    by_environment: dict[str, list[float]] = defaultdict(list)
    for rollout, reward in zip(rollouts, rewards.tolist(), strict=True):
        if rollout.failure is None:
            by_environment[rollout.environment].append(reward)
    graded = [reward for values in by_environment.values() for reward in values]
    if not graded:
        return {}
    metrics = {"reward/mean": fmean(graded), "reward/std": _std(graded)}
    metrics["reward/min"], metrics["reward/max"] = min(graded), max(graded)
    for name, values in sorted(by_environment.items()):
        metrics[f"reward/{name}/mean"] = fmean(values)
        metrics[f"reward/{name}/std"] = _std(values)
    return metrics


def component_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Mean of each named reward component per environment."""
    values: dict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        if rollout.failure is None:
            for name, value in ({GRADER_FAILED: 0.0} | rollout.components).items():
                values[f"reward/{rollout.environment}/{name}"].append(value)
    return {k: fmean(v) for k, v in sorted(values.items()) if any(v) or not k.endswith(f"/{GRADER_FAILED}")}


def completion_metrics(rollouts: Sequence[Rollout], untrained: Sequence[str | None] = ()) -> dict[str, float]:
    """Truncation rate, failures by class (as shares of all rollouts), response lengths and turns."""
    if not rollouts:
        return {}
    sampled = [r for r in rollouts if r.weight_versions]
    metrics = {"truncation_rate": fmean([float(r.truncated) for r in sampled]) if sampled else 0.0}
    outcomes = [*(r.failure for r in rollouts), *untrained]
    failures = Counter(failure for failure in outcomes if failure is not None)
    metrics["failure_rate"] = failures.total() / len(outcomes)
    for name, count in sorted(failures.items()):
        metrics[f"failures/{name}"] = count / len(outcomes)
    if sampled:
        lengths = [float(sum(r.token_mask)) for r in sampled]
        metrics["response_length/mean"], metrics["response_length/max"] = fmean(lengths), max(lengths)
        metrics["turns/mean"] = fmean([float(len(r.turns)) for r in sampled])
    return metrics


def environment_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Mean response length and failure rate per environment, where there are several; rewards are reward_metrics'."""
    by_environment: dict[str, list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        by_environment[rollout.environment].append(rollout)
    metrics: dict[str, float] = {}
    for name, own in sorted(by_environment.items()) if len(by_environment) > 1 else ():
        lengths = [float(sum(rollout.token_mask)) for rollout in own if rollout.weight_versions]
        if lengths:
            metrics[f"response_length/{name}/mean"] = fmean(lengths)
        metrics[f"failure_rate/{name}"] = fmean([float(rollout.failure is not None) for rollout in own])
    return metrics


def reward_penalty_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Share of the graded rollouts that lost their reward, by `reward_penalties.*`; none where none were looked at."""
    looked_at = [r.metadata[REWARD_PENALTIES_KEY] for r in rollouts if REWARD_PENALTIES_KEY in r.metadata]
    counts = Counter(name for names in looked_at for name in names)
    return {f"reward_penalties/{penalty}": counts[penalty] / len(looked_at) for penalty in RewardPenalty if looked_at}


def group_metrics(group_std: torch.Tensor, group_index: torch.Tensor, valid_count: torch.Tensor) -> dict[str, float]:
    """Share of groups with zero std, and with too few graded rollouts to compare."""
    rows: dict[int, int] = {}
    for row, group in enumerate(group_index.tolist()):
        rows.setdefault(group, row)
    first = list(rows.values())
    if not first:
        return {}
    return {
        "groups/count": float(len(first)),
        "groups/zero_std_share": float((group_std[first] == 0).double().mean()),
        "groups/incomparable_share": float((valid_count[first] < 2).double().mean()),
    }


def _std(values: Sequence[float]) -> float:
    """Population standard deviation, two passes."""
    mean = fmean(values)
    return float(fmean([(value - mean) ** 2 for value in values]) ** 0.5)
