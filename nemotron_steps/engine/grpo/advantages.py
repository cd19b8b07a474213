"""Advantages from rewards: what each estimator gives credit for, and the group statistics under them.

Everything is computed in float64 and in two passes (mean first, then squared distances from it): E[r^2] - E[r]^2 in
float32 cancels, and a group like [0, .95 x 7] then gets an advantage of thousands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from nemotron_steps.errors import EngineError

if TYPE_CHECKING:
    from nemotron_steps.config.schema.grpo import GrpoConfig

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
    """Baseline and Bessel-corrected std per rollout, over the valid samples of its group; 0 for invalid samples, whose
    rewards are never read. Leave-one-out (RLOO, arXiv:2402.14740): the std leaves a sample out of its own, too. All are
    [N]; equal int64 numbers are one prompt group."""
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
    """A = r - baseline, divided by (std + 1e-6) where std > 0 (GRPO, arXiv:2402.03300): float64 [N] of rewards [N], 0
    for invalid samples and for groups with at most one valid sample."""
    advantages = rewards.double() - statistics.baseline
    if normalize:
        scale = torch.where(statistics.std > 0, statistics.std + STD_EPSILON, torch.ones_like(statistics.std))
        advantages = advantages / scale
    return torch.where(valid & (statistics.valid_count > 1), advantages, torch.zeros_like(advantages))


@dataclass(frozen=True)
class GradedRewards:
    """A step's N rollouts as an estimator sees them."""

    rewards: torch.Tensor
    """float64 [N], scaled and shaped; entries of invalid rollouts are never read."""
    components: Mapping[str, torch.Tensor]
    """Named parts of the reward that every valid rollout carries, float64 [N] each, scaled and shaped as it is."""
    group_index: torch.Tensor
    """int64 [N], equal for the rollouts of one prompt."""
    valid: torch.Tensor
    """bool [N], rollouts that were graded."""
    statistics: GroupStatistics
    """Of `rewards`, under `grpo.use_leave_one_out_baseline`."""
    teacher_gap: torch.Tensor | None = None
    """[N, T] each token's logprob under its row's teacher, less that under the policy; None without teachers."""


Estimator = Callable[["GrpoConfig", GradedRewards, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""(`grpo`, a step's rewards, [N, T] mask of trained tokens, [N, T] beta x KL of each token, which is taken off its
reward (`loss_fn.use_kl_in_reward`), or None) → float64 [N, T]; 0 for invalid rollouts, anything outside the mask."""


def group_relative(
    config: GrpoConfig, graded: GradedRewards, mask: torch.Tensor, kl_penalty: torch.Tensor | None
) -> torch.Tensor:
    """A rollout is credited for being better than the others of its prompt (GRPO, arXiv:2402.03300). All of its tokens
    get the same: its reward less the mean of the others (or of the whole group), in units of their spread."""
    normalize = config.normalize_rewards
    advantages = grpo_advantages(graded.rewards, graded.statistics, graded.valid, normalize=normalize)
    return _over_tokens(advantages, mask, kl_penalty)


def reward_decoupled(
    config: GrpoConfig, graded: GradedRewards, mask: torch.Tensor, kl_penalty: torch.Tensor | None
) -> torch.Tensor:
    """A rollout is credited for each reward component apart, so that none drowns in another's scale (GDPO,
    arXiv:2601.05242): the group-relative advantages of `adv_estimator.components`, each times its `reward_weights`
    entry, are summed and standardised over the batch (mean 0, Bessel-corrected std 1)."""
    names = config.adv_estimator.components
    weights = config.adv_estimator.reward_weights or (1.0,) * len(names)
    missing = [name for name in names if name not in graded.components]
    if missing:
        raise EngineError(
            "GDPO needs reward components that every rollout carries",
            where="grpo.adv_estimator.components",
            expected=f"some of {', '.join(sorted(graded.components)) or 'no component'}",
            found=", ".join(missing),
            hints=("grpo.adv_estimator.name=grpo grpo.adv_estimator.components=[]",),
        )
    valid = graded.valid
    total = torch.zeros(len(valid), dtype=torch.float64)
    for name, weight in zip(names, weights, strict=True):
        values = graded.components[name]
        leave_one_out = config.use_leave_one_out_baseline
        statistics = group_statistics(values, graded.group_index, valid, leave_one_out=leave_one_out)
        total += weight * grpo_advantages(values, statistics, valid, normalize=config.normalize_rewards)
    if bool(valid.any()):
        mean, std = _mean_and_std(total[valid].unsqueeze(0))
        centred = (total - mean) / (std if float(std) > 0 else 1.0)
        total = torch.where(valid, centred, torch.zeros_like(total))
    return _over_tokens(total, mask, kl_penalty)


def reinforce_plus_plus(
    config: GrpoConfig, graded: GradedRewards, mask: torch.Tensor, kl_penalty: torch.Tensor | None
) -> torch.Tensor:
    """A token is credited for being better than the average token of the batch (Reinforce++, arXiv:2501.03262). It has
    its rollout's reward, less the mean of its prompt's rollouts under `adv_estimator.minus_baseline`, less its own KL;
    then (A - mean) / sqrt(max(var, 1e-8)), mean and population variance over the batch's trained tokens."""
    rewards, valid = graded.rewards.double(), graded.valid
    if config.adv_estimator.minus_baseline:
        whole = group_statistics(rewards, graded.group_index, valid, leave_one_out=False)
        rewards = rewards - whole.baseline
    tokens = _over_tokens(torch.where(valid, rewards, torch.zeros_like(rewards)), mask, kl_penalty)
    trained = (mask > 0) & valid.unsqueeze(-1)
    zeros = torch.zeros_like(tokens)
    count = trained.sum().clamp(min=1)
    mean = torch.where(trained, tokens, zeros).sum() / count
    variance = torch.where(trained, (tokens - mean).square(), zeros).sum() / count
    return torch.where(trained, (tokens - mean) * variance.clamp(min=1e-8).rsqrt(), zeros)


def teacher_gap(
    config: GrpoConfig, graded: GradedRewards, mask: torch.Tensor, kl_penalty: torch.Tensor | None
) -> torch.Tensor:
    """A token is credited for being likelier to the teacher than to the policy: log pi_teacher - log pi (MiMo-V2-Flash,
    arXiv:2601.02780). Its policy gradient is that of the reverse KL, by one sample. Rewards have no part in it."""
    assert graded.teacher_gap is not None, "adv_estimator.name=opd needs teachers"
    trained = (mask > 0) & graded.valid.unsqueeze(-1)
    gap = graded.teacher_gap.double()
    return torch.where(trained, gap, torch.zeros_like(gap))


ESTIMATORS: Mapping[str, Estimator] = {
    "grpo": group_relative,
    "gdpo": reward_decoupled,
    "reinforce_plus_plus": reinforce_plus_plus,
    "opd": teacher_gap,
}
"""`grpo.adv_estimator.name` -> estimator."""


def _over_tokens(advantages: torch.Tensor, mask: torch.Tensor, kl_penalty: torch.Tensor | None) -> torch.Tensor:
    """[N] -> [N, T]: each rollout's advantage at all of its tokens, less the token's own penalty."""
    tokens = advantages.unsqueeze(-1).expand(mask.shape)
    return tokens if kl_penalty is None else tokens - kl_penalty.double()
