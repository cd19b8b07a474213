from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemotron_steps.config.schema.grpo import RewardScalingConfig
from nemotron_steps.engine.grpo.filters import DynamicSampler, epsilon_filter
from nemotron_steps.errors import EngineError
from tests.engine.engine_samples import group

PLAIN = RewardScalingConfig()


def test_only_groups_whose_rewards_differ_are_kept_in_order() -> None:
    sampler = DynamicSampler(2, 10, PLAIN)
    sampler.offer([group("a", [1, 1]), group("b", [0, 1]), group("c", [0, 0])])
    assert not sampler.complete and sampler.missing == 1
    sampler.offer([group("d", [1, 0]), group("e", [0.5, 0])])
    assert sampler.complete
    assert [g.group_id for g in sampler.take()] == ["b", "d"]
    assert [g.group_id for g in sampler.kept] == ["e"]
    assert sampler.metrics() == {
        "dynamic_sampling/batches": 2.0,
        "dynamic_sampling/discarded_share": 0.4,
        "dynamic_sampling/surplus_groups": 1.0,
        "dynamic_sampling/ungraded_groups": 0.0,
    }


def test_the_signal_is_looked_for_after_scaling() -> None:
    clamped = RewardScalingConfig(enabled=True, source_min=0.0, source_max=1.0)
    sampler = DynamicSampler(1, 10, clamped)
    sampler.offer([group("a", [2.0, 7.0])])  # both clamp to 1
    assert not sampler.complete


def test_groups_that_nobody_graded_are_tried_again_and_are_no_groups_without_a_signal() -> None:
    silent = group("a", [0, 1, 1], failure="judge_unavailable")
    sampler = DynamicSampler(1, 2, PLAIN)
    assert sampler.offer([group("b", [1, 1, 1]), silent]) == [1]
    assert sampler.offer([silent]) == [0]  # the limit counts what was graded: one group of two so far
    assert sampler.offer([group("c", [0, 1, 1]), group("d", [1, 0, 0])]) == []
    sampler.take()
    metrics = sampler.metrics()
    assert metrics["dynamic_sampling/ungraded_groups"] == 2.0
    assert metrics["dynamic_sampling/discarded_share"] == pytest.approx(1 / 3)
    assert sampler.untrained == [None] * 3 + ["judge_unavailable"] * 6 + [None] * 3  # the last is the surplus


def test_it_gives_up_with_numbers_and_advice() -> None:
    sampler = DynamicSampler(1, 3, PLAIN)
    for i in range(2):
        sampler.offer([group(f"g{i}", [1, 1])])
    with pytest.raises(EngineError, match="found 0 groups with differing rewards in 3 batches") as caught:
        sampler.offer([group("last", [0, 0])])
    assert caught.value.hints[0].startswith("grpo.num_generations_per_prompt=4 ")
    with pytest.raises(EngineError, match="still missing"):
        sampler.take()


def test_the_limit_counts_generation_batches_which_may_be_larger_than_a_step() -> None:
    sampler = DynamicSampler(2, 2, PLAIN, batch_size=3)
    sampler.offer([group(f"a{i}", [1, 1]) for i in range(3)])
    sampler.offer([group(f"b{i}", [1, 1]) for i in range(2)])  # five of six
    with pytest.raises(EngineError, match="in 2 batches"):
        sampler.offer([group("c", [1, 1])])


@given(means=st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=40), limit=st.floats(0.01, 1.0))
def test_at_most_the_limit_of_trivial_groups_stays_and_no_other_is_dropped(means: list[float], limit: float) -> None:
    keep = epsilon_filter(torch.tensor(means, dtype=torch.float64), epsilon=0.05, limit=limit).tolist()
    trivial = [m != 0.5 for m in means]
    kept = sum(k and t for k, t in zip(keep, trivial, strict=True))
    assert kept == min(sum(trivial), int(limit * len(means) + 1e-9))
    assert all(k for k, t in zip(keep, trivial, strict=True) if not t)
