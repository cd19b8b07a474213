import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemotron_steps.config.schema.grpo import GrpoConfig, LossFnConfig
from nemotron_steps.engine.grpo.advantages import (
    ESTIMATORS,
    GradedRewards,
    group_statistics,
    grpo_advantages,
)
from nemotron_steps.engine.losses.loss import LossNormalizers
from nemotron_steps.engine.losses.policy_gradient import PolicyGradientLoss
from nemotron_steps.engine.types import TrainBatch


def advantages(
    rewards: list[float],
    groups: list[int] | None = None,
    valid: list[bool] | None = None,
    *,
    leave_one_out: bool = True,
    normalize: bool = True,
) -> list[float]:
    r = torch.tensor(rewards, dtype=torch.float64)
    index = torch.tensor(groups if groups is not None else [0] * len(rewards))
    ok = torch.tensor(valid if valid is not None else [True] * len(rewards))
    stats = group_statistics(r, index, ok, leave_one_out=leave_one_out)
    return grpo_advantages(r, stats, ok, normalize=normalize).tolist()


def by_hand(rewards: list[float], *, leave_one_out: bool, normalize: bool) -> list[float]:
    """The contract on one group, with the standard library."""
    result = []
    for i, r in enumerate(rewards):
        base = rewards[:i] + rewards[i + 1 :] if leave_one_out else rewards
        if len(rewards) < 2:
            result.append(0.0)
            continue
        std = statistics.stdev(base) if len(base) > 1 and len(set(base)) > 1 else 0.0
        a = r - statistics.fmean(base)
        result.append(a / (std + 1e-6) if normalize and std > 0 else a)
    return result


def test_golden_vectors() -> None:
    assert advantages([1, 0, 0, 0, 0, 0, 0, 0]) == pytest.approx([1.0] + [-0.378] * 7, abs=5e-4)
    assert advantages([1, 1, 1, 1, 0, 0, 0, 0]) == pytest.approx([1.069] * 4 + [-1.069] * 4, abs=5e-4)
    half = advantages([1, 1, 1, 1, 0, 0, 0, 0], leave_one_out=False)
    assert half == pytest.approx([0.9354] * 4 + [-0.9354] * 4, abs=5e-5)


def test_nearly_equal_rewards_do_not_explode() -> None:
    got = advantages([0.0] + [0.95] * 7)
    assert got[0] == -0.95  # the others are all equal: std 0, not divided
    assert got[1:] == pytest.approx([0.378] * 7, abs=5e-4)
    # 0.1 + 0.2 and 0.3 differ by one rounding only: equal rewards.
    assert advantages([0.1 + 0.2, 0.3, 0.3, 0.3]) == pytest.approx([0.0] * 4, abs=1e-12)


def estimate(
    config: dict[str, object],
    rewards: list[float],
    groups: list[int],
    *,
    mask: torch.Tensor | None = None,
    components: dict[str, list[float]] | None = None,
    valid: list[bool] | None = None,
    kl_penalty: torch.Tensor | None = None,
) -> torch.Tensor:
    """[N, T] advantages by the estimator that `grpo.*` keys ask for; two tokens a rollout unless a mask is given."""
    grpo = GrpoConfig.model_validate(config)
    r, index = torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups)
    ok = torch.tensor(valid if valid is not None else [True] * len(rewards))
    statistics = group_statistics(r, index, ok, leave_one_out=grpo.use_leave_one_out_baseline)
    parts = {name: torch.tensor(values, dtype=torch.float64) for name, values in (components or {}).items()}
    graded = GradedRewards(r, parts, index, ok, statistics)
    mask = torch.ones(len(rewards), 2) if mask is None else mask
    return ESTIMATORS[grpo.adv_estimator.name](grpo, graded, mask, kl_penalty)


@given(
    rewards=st.lists(st.sampled_from([0.0, 0.2, 1.0, -5.0]), min_size=4, max_size=9),
    seed=st.integers(0, 99),
    loo=st.booleans(),
    normalize=st.booleans(),
    minus_baseline=st.booleans(),
)
def test_estimators_agree_with_their_formulas_written_out(
    rewards: list[float], seed: int, loo: bool, normalize: bool, minus_baseline: bool
) -> None:
    g = torch.Generator().manual_seed(seed)
    n = len(rewards)
    groups = [i % 2 for i in range(n)]
    mask = (torch.rand(n, 3, generator=g) < 0.7).float()
    mask[:, 1] = 1.0
    kl = torch.rand(n, 3, generator=g, dtype=torch.float64)
    other = torch.rand(n, generator=g, dtype=torch.float64).tolist()
    keys: dict[str, object] = {"use_leave_one_out_baseline": loo, "normalize_rewards": normalize}

    def relative(values: list[float]) -> list[float]:
        found = [0.0] * n
        for group in (0, 1):
            rows = [i for i in range(n) if groups[i] == group]
            part = by_hand([values[i] for i in rows], leave_one_out=loo, normalize=normalize)
            for row, advantage in zip(rows, part, strict=True):
                found[row] = advantage
        return found

    got = estimate(keys, rewards, groups, mask=mask, kl_penalty=kl)
    assert got.flatten().tolist() == pytest.approx(
        [a - kl[i, t].item() for i, a in enumerate(relative(rewards)) for t in range(3)], rel=1e-9, abs=1e-9
    )

    weights = [2.0, -0.5]
    gdpo = {"name": "gdpo", "components": ["a", "b"], "reward_weights": weights}
    summed = [weights[0] * a + weights[1] * b for a, b in zip(relative(rewards), relative(other), strict=True)]
    mean, std = statistics.fmean(summed), statistics.stdev(summed)
    spread = std if max(summed) - min(summed) > 1e-9 else 1.0
    got = estimate({**keys, "adv_estimator": gdpo}, rewards, groups, components={"a": rewards, "b": other})
    assert got[:, 0].tolist() == pytest.approx([(a - mean) / spread for a in summed], rel=1e-6, abs=1e-6)

    means = [statistics.fmean(r for r, k in zip(rewards, groups, strict=True) if k == group) for group in (0, 1)]
    estimator = {"name": "reinforce_plus_plus", "minus_baseline": minus_baseline}
    got = estimate({"adv_estimator": estimator}, rewards, groups, mask=mask, kl_penalty=kl)
    tokens = {
        (i, t): rewards[i] - (means[groups[i]] if minus_baseline else 0.0) - kl[i, t].item()
        for i in range(n)
        for t in range(3)
        if mask[i, t] > 0
    }
    mean, std = statistics.fmean(tokens.values()), max(statistics.pvariance(tokens.values()), 1e-8) ** 0.5
    expected = [(tokens[i, t] - mean) / std if (i, t) in tokens else 0.0 for i in range(n) for t in range(3)]
    assert got.flatten().tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("reinforce", [True, False])
@pytest.mark.parametrize("off_policy", [False, True])
def test_expected_policy_gradient_of_the_gap_is_the_gradient_of_the_reverse_kl(
    reinforce: bool, off_policy: bool
) -> None:
    """Over every token of a small vocabulary, weighted as the generator samples them: minimised is KL(p || q)."""
    torch.manual_seed(0)
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    q = torch.randn(6, dtype=torch.float64).log_softmax(-1)
    p = logits.log_softmax(-1)
    sampler = torch.randn(6, dtype=torch.float64).log_softmax(-1) if off_policy else p.detach()
    expected = torch.autograd.grad((p.exp() * (p - q)).sum(), logits, retain_graph=True)[0]
    config = LossFnConfig(
        disable_ppo_ratio=reinforce, ratio_clip_min=0.2, use_importance_sampling_correction=off_policy
    )
    total = torch.zeros(6, dtype=torch.float64)
    for token in range(6):
        column = torch.tensor([[0.0, 1.0]])
        prev, gap = p.detach()[token], (q - p.detach())[token]
        row = torch.zeros(1, 2)
        batch = TrainBatch(
            input_ids=torch.zeros(1, 2, dtype=torch.int64),
            lengths=torch.tensor([2]),
            token_mask=column,
            sample_mask=torch.ones(1),
            generation_logprobs=row + column * sampler[token],
            advantages=row + column * gap,
            prev_logprobs=row + column * prev,
        )
        loss, _ = PolicyGradientLoss(config)(column * p[token], batch, LossNormalizers(1, 1))
        total += sampler[token].exp() * torch.autograd.grad(loss, logits, retain_graph=True)[0]
    torch.testing.assert_close(total, expected, atol=1e-5, rtol=1e-4)
