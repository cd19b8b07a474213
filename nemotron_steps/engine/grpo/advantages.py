"""Advantages from rewards: the group-relative baseline of GRPO, Reinforce++ and GDPO.

Everything is computed in float64 and in two passes (mean first, then squared distances from it): E[r^2] - E[r]^2 in
float32 cancels, and a group like [0, .95 x 7] then gets an advantage of thousands. Groups are told apart by an explicit
group index, never by their prompt tokens: one prompt in two environments is two groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from nemotron_steps.errors import EngineError

STD_EPSILON = 1e-6
"""Added to a positive std before dividing by it."""
ROUNDING = 1e-9
"""Rewards whose spread is below this share of their size are equal up to float64 rounding: std 0."""


@dataclass(frozen=True)
class GroupStatistics:
    """Baseline and spread each rollout is compared with; every tensor is [N]."""

    baseline: torch.Tensor
    """float64, mean reward of the others (leave-one-out) or of the whole group."""
    std: torch.Tensor
    """float64, Bessel-corrected, over the same samples as the baseline; 0 with fewer than two."""
    valid_count: torch.Tensor
    """int64, valid samples in the rollout's group."""
    group_std: torch.Tensor
    """float64, Bessel-corrected std of all valid samples of the group; 0 marks a group without a signal."""


def group_statistics(
    rewards: torch.Tensor, group_index: torch.Tensor, valid: torch.Tensor, *, leave_one_out: bool
) -> GroupStatistics:
    """Baseline and Bessel-corrected std per rollout, over the valid samples of its group.

    Leave-one-out (RLOO, arXiv:2402.14740): sample i is compared with the n - 1 others, and the std leaves it out too.

    Args:
        rewards: [N]; entries of invalid samples are never read.
        group_index: int64 [N]; equal numbers are one prompt group.
        valid: bool [N]; False for rollouts that could not be graded.
        leave_one_out: `grpo.use_leave_one_out_baseline`.

    Returns:
        Statistics; 0 for invalid samples.
    """
    rewards = rewards.double()
    baseline = torch.zeros_like(rewards)
    std = torch.zeros_like(rewards)
    _, group = torch.unique(group_index, return_inverse=True)  # type: ignore[no-untyped-call]
    count = torch.bincount(group[valid], minlength=int(group.max()) + 1)
    group_std = torch.zeros(len(count), dtype=torch.float64)
    rows = torch.nonzero(valid).squeeze(-1)
    rows = rows[torch.argsort(group[rows], stable=True)]
    # Groups with equally many valid rollouts are computed together, as one [groups, rollouts] matrix.
    for size in sorted(set(count.tolist())):
        if size == 0:
            continue
        rollouts = rows[count[group[rows]] == size].view(-1, size)
        values = rewards[rollouts]
        whole_mean, whole_std = _mean_and_std(values)
        group_std[group[rollouts[:, 0]]] = whole_std
        if not leave_one_out:
            baseline[rollouts], std[rollouts] = whole_mean.unsqueeze(-1), whole_std.unsqueeze(-1)
        elif size > 1:
            apart = ~torch.eye(size, dtype=torch.bool)
            others = values.unsqueeze(1).expand(-1, size, -1)[:, apart].view(-1, size, size - 1)
            baseline[rollouts], std[rollouts] = _mean_and_std(others)
    return GroupStatistics(baseline, std, count[group], group_std[group])


def _mean_and_std(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and Bessel-corrected std over the last dimension, which they drop; equal numbers have std exactly 0."""
    mean = rows.mean(dim=-1)
    if rows.shape[-1] < 2:
        return mean, torch.zeros_like(mean)
    variance = (rows - mean.unsqueeze(-1)).square().sum(dim=-1) / (rows.shape[-1] - 1)
    low, high = rows.amin(dim=-1), rows.amax(dim=-1)
    # The mean of equal numbers may be off by one rounding, which would leave a std of 1e-17 to divide by.
    constant = (high - low) <= ROUNDING * torch.maximum(low.abs(), high.abs())
    return torch.where(constant, low, mean), torch.where(constant, torch.zeros_like(mean), variance.sqrt())


def grpo_advantages(
    rewards: torch.Tensor, statistics: GroupStatistics, valid: torch.Tensor, *, normalize: bool
) -> torch.Tensor:
    """A = r - baseline, divided by (std + 1e-6) where std > 0 (GRPO, arXiv:2402.03300).

    Args:
        rewards: [N].
        statistics: from `group_statistics` of the same rewards.
        valid: bool [N].
        normalize: `grpo.normalize_rewards`.

    Returns:
        float64 [N]; 0 for invalid samples and for groups with at most one valid sample.
    """
    advantages = rewards.double() - statistics.baseline
    if normalize:
        scale = torch.where(statistics.std > 0, statistics.std + STD_EPSILON, torch.ones_like(statistics.std))
        advantages = advantages / scale
    return torch.where(valid & (statistics.valid_count > 1), advantages, torch.zeros_like(advantages))


def gdpo_advantages(
    components: Mapping[str, torch.Tensor],
    group_index: torch.Tensor,
    valid: torch.Tensor,
    *,
    names: Sequence[str],
    leave_one_out: bool,
    normalize: bool,
) -> torch.Tensor:
    """Group-reward-decoupled normalisation (GDPO, arXiv:2601.05242): normalise each component, then sum.

    A_k = GRPO advantage of component k within its group; A = sum_k A_k, then standardised (mean 0, Bessel std 1) over
    the valid samples of the batch. Components of different scales so keep their own resolution.

    Args:
        components: name -> [N] rewards.
        group_index: int64 [N].
        valid: bool [N].
        names: `grpo.adv_estimator.components`.
        leave_one_out: `grpo.use_leave_one_out_baseline`.
        normalize: `grpo.normalize_rewards`.

    Returns:
        float64 [N]; 0 for invalid samples.

    Raises:
        EngineError: a component that the rollouts do not carry.
    """
    missing = [name for name in names if name not in components]
    if missing:
        raise EngineError(
            "GDPO needs reward components that every rollout carries",
            where="grpo.adv_estimator.components",
            expected="components of every rollout, of which there are: " + (", ".join(sorted(components)) or "none"),
            found=", ".join(missing),
            hints=("grpo.adv_estimator.name=grpo grpo.adv_estimator.components=[]",),
        )
    total = torch.zeros(len(group_index), dtype=torch.float64)
    for name in names:
        statistics = group_statistics(components[name], group_index, valid, leave_one_out=leave_one_out)
        total += grpo_advantages(components[name], statistics, valid, normalize=normalize)
    if not bool(valid.any()):
        return total
    mean, std = _mean_and_std(total[valid].unsqueeze(0))
    centred = (total - mean) / (std if float(std) > 0 else 1.0)
    return torch.where(valid, centred, torch.zeros_like(total))


def reinforce_plus_plus_advantages(
    rewards: torch.Tensor,
    group_index: torch.Tensor,
    valid: torch.Tensor,
    mask: torch.Tensor,
    *,
    minus_baseline: bool,
    kl_penalty: torch.Tensor | None = None,
) -> torch.Tensor:
    """Reinforce++ (arXiv:2501.03262): token advantages normalised over the whole batch instead of the group.

    A_t = r - (group mean, with `minus_baseline`) - beta KL_t, then (A - mean) / sqrt(max(var, 1e-8)), mean and
    population variance over every trained token of the batch.

    Args:
        rewards: [N].
        group_index: int64 [N].
        valid: bool [N].
        mask: [N, T] trained tokens.
        minus_baseline: `grpo.adv_estimator.minus_baseline`.
        kl_penalty: [N, T] beta x KL per token, for `loss_fn.use_kl_in_reward`.

    Returns:
        float64 [N, T], 0 outside the mask.
    """
    advantages = torch.where(valid, rewards.double(), torch.zeros_like(rewards, dtype=torch.float64))
    if minus_baseline:
        advantages = advantages - group_statistics(rewards, group_index, valid, leave_one_out=False).baseline
    trained = (mask > 0) & valid.unsqueeze(-1)
    tokens = advantages.unsqueeze(-1).expand(mask.shape)
    if kl_penalty is not None:
        tokens = tokens - kl_penalty.double()
    zeros = torch.zeros_like(tokens)
    count = trained.sum().clamp(min=1)
    mean = torch.where(trained, tokens, zeros).sum() / count
    variance = torch.where(trained, (tokens - mean).square(), zeros).sum() / count
    return torch.where(trained, (tokens - mean) * variance.clamp(min=1e-8).rsqrt(), zeros)


def clip_advantages(advantages: torch.Tensor, low: float | None, high: float | None) -> torch.Tensor:
    """Clamp to [low, high]; None leaves that side open (`grpo.advantage_clip_low`, `advantage_clip_high`)."""
    if low is None and high is None:
        return advantages
    return advantages.clamp(min=low, max=high)
