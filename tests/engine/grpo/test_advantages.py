from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemotron_steps.engine.grpo.advantages import (
    clip_advantages,
    gdpo_advantages,
    group_statistics,
    grpo_advantages,
    reinforce_plus_plus_advantages,
)
from nemotron_steps.errors import EngineError


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


def test_small_groups() -> None:
    assert advantages([0.7]) == [0.0]
    assert advantages([1.0, 0.0]) == [1.0, -1.0]  # leave-one-out std of one other is 0: unnormalised
    assert advantages([5.0, 1.0, 2.0], valid=[True, False, False]) == [0.0, 0.0, 0.0]


def test_samples_that_could_not_be_graded_take_no_part() -> None:
    got = advantages([1.0, float("nan"), 0.0, 0.0], valid=[True, False, True, True])
    assert got[1] == 0.0
    assert [got[0], got[2], got[3]] == pytest.approx(advantages([1.0, 0.0, 0.0]))


def test_groups_are_told_apart_by_index_alone() -> None:
    mixed = advantages([1, 0, 0, 1, 0.5, 0], groups=[7, 3, 7, 3, 7, 3])
    a, b = advantages([1, 0, 0.5]), advantages([0, 1, 0])
    assert mixed == pytest.approx([a[0], b[0], a[1], b[1], a[2], b[2]])


REWARDS = st.lists(st.sampled_from([0.0, 0.2, 0.5, 0.95, 1.0, 3.0, -5.0]), min_size=2, max_size=9)


@given(rewards=REWARDS, leave_one_out=st.booleans(), normalize=st.booleans())
def test_agrees_with_the_standard_library(rewards: list[float], leave_one_out: bool, normalize: bool) -> None:
    got = advantages(rewards, leave_one_out=leave_one_out, normalize=normalize)
    assert got == pytest.approx(by_hand(rewards, leave_one_out=leave_one_out, normalize=normalize), rel=1e-9, abs=1e-9)


@given(rewards=REWARDS, shift=st.floats(-100, 100), leave_one_out=st.booleans())
def test_a_shift_of_all_rewards_changes_nothing_and_unnormalised_advantages_sum_to_zero(
    rewards: list[float], shift: float, leave_one_out: bool
) -> None:
    base = advantages(rewards, leave_one_out=leave_one_out)
    moved = advantages([r + shift for r in rewards], leave_one_out=leave_one_out)
    assert moved == pytest.approx(base, rel=1e-6, abs=1e-6)
    assert sum(advantages(rewards, leave_one_out=leave_one_out, normalize=False)) == pytest.approx(0.0, abs=1e-9)


@given(rewards=REWARDS, order=st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter(rewards: list[float], order: object) -> None:
    rows = list(range(len(rewards)))
    order.shuffle(rows)  # type: ignore[attr-defined]
    base = advantages(rewards)
    assert advantages([rewards[i] for i in rows]) == pytest.approx([base[i] for i in rows], rel=1e-9, abs=1e-9)


def test_gdpo_gives_a_small_component_the_same_say_as_a_large_one() -> None:
    index, valid = torch.tensor([0, 0, 0, 0]), torch.ones(4, dtype=torch.bool)
    big = torch.tensor([100.0, 0.0, 100.0, 0.0])
    small = torch.tensor([0.01, 0.01, 0.0, 0.0])
    got = gdpo_advantages(
        {"big": big, "small": small}, index, valid, names=("big", "small"), leave_one_out=False, normalize=True
    )
    # Both components standardise to +-0.866, so rows 1 and 2 tie; the sum is standardised again.
    assert got.tolist() == pytest.approx([1.2247, 0.0, 0.0, -1.2247], abs=2e-3)
    assert got.std().item() == pytest.approx(1.0)


def test_gdpo_equals_a_sum_of_group_advantages_standardised_over_the_batch() -> None:
    torch.manual_seed(1)
    parts = {"a": torch.rand(12), "b": torch.rand(12) * 7}
    index = torch.arange(3).repeat_interleave(4)
    valid = torch.ones(12, dtype=torch.bool)
    valid[5] = False
    got = gdpo_advantages(parts, index, valid, names=("a", "b"), leave_one_out=True, normalize=True)
    total = [0.0] * 12
    for values in parts.values():
        ok = valid.tolist()
        for i, a in enumerate(advantages(values.double().tolist(), index.tolist(), ok)):
            total[i] += a
    kept = [t for t, v in zip(total, valid.tolist(), strict=True) if v]
    mean, std = statistics.fmean(kept), statistics.stdev(kept)
    expected = [(t - mean) / std if v else 0.0 for t, v in zip(total, valid.tolist(), strict=True)]
    assert got.tolist() == pytest.approx(expected, rel=1e-9)


def test_gdpo_names_the_component_that_rollouts_lack() -> None:
    index, valid = torch.zeros(2, dtype=torch.long), torch.ones(2, dtype=torch.bool)
    with pytest.raises(EngineError, match="components that every rollout carries") as caught:
        gdpo_advantages({"a": torch.ones(2)}, index, valid, names=("a", "nope"), leave_one_out=True, normalize=True)
    assert "nope" in (caught.value.found or "")


def test_reinforce_plus_plus_normalises_over_the_tokens_of_the_batch() -> None:
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.0])
    index = torch.tensor([0, 0, 1, 1])
    valid = torch.ones(4, dtype=torch.bool)
    mask = torch.tensor([[0, 1, 1, 1], [0, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 0]], dtype=torch.float32)
    got = reinforce_plus_plus_advantages(rewards, index, valid, mask, minus_baseline=True)
    values = [0.5] * 3 + [-0.5] + [0.5] * 2 + [-0.5] * 2
    mean, std = statistics.fmean(values), statistics.pstdev(values)
    assert got[0, 1].item() == pytest.approx((0.5 - mean) / std)
    assert got[mask > 0].mean().item() == pytest.approx(0.0, abs=1e-12)
    assert got[mask > 0].std(correction=0).item() == pytest.approx(1.0)
    assert not got[mask == 0].any()


def test_reinforce_plus_plus_with_kl_in_the_reward_lowers_tokens_that_left_the_reference() -> None:
    rewards, index, valid = torch.tensor([1.0, 1.0]), torch.tensor([0, 1]), torch.ones(2, dtype=torch.bool)
    mask = torch.tensor([[0.0, 1.0, 1.0], [0.0, 1.0, 1.0]])
    penalty = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    got = reinforce_plus_plus_advantages(rewards, index, valid, mask, minus_baseline=False, kl_penalty=penalty)
    # Tokens before normalisation: 1, 0, 1, 1.
    assert got[0, 1].item() == pytest.approx(0.25 / 0.1875**0.5)
    assert got[0, 2].item() == pytest.approx(-0.75 / 0.1875**0.5)


@settings(max_examples=25)
@given(
    values=st.lists(st.floats(-300, 300), min_size=1, max_size=5),
    low=st.none() | st.floats(-100, 0),
    high=st.none() | st.floats(0, 100),
)
def test_clip_keeps_values_inside_and_leaves_open_sides_open(
    values: list[float], low: float | None, high: float | None
) -> None:
    got = clip_advantages(torch.tensor(values, dtype=torch.float64), low, high).tolist()
    for before, after in zip(values, got, strict=True):
        floor = before if low is None else max(before, low)
        assert after == (floor if high is None else min(floor, high))
