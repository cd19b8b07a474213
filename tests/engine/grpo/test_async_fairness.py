"""The asynchronous loop on a virtual clock, with answers of very different lengths: who is trained, and what is waited
for. docs/decisions/promised-groups.md says why."""

from __future__ import annotations

import pytest

from benchmarks.bench_async_fairness import Reports, Workload, simulate

SMALL = Workload(prompts=8, answers=8, steps=40, train_s=30.0)


@pytest.mark.parametrize("age", [1, 3])
def test_hard_prompts_are_trained_as_often_as_offered_and_the_loop_adds_no_waiting_of_its_own(age: int) -> None:
    outcome = simulate(SMALL.with_(age=age))
    assert outcome.trained == outcome.offered == 8 * 40
    assert outcome.hardest_fifth >= 0.97 and abs(outcome.length - 1) <= 0.02
    assert outcome.cut <= 0.05 * outcome.offered and outcome.dropped == 0
    assert outcome.policy_lag_max == age
    assert outcome.step_s <= 1.01 * outcome.least_step_s
    # Whatever takes how long, a step trains on its own part of the data order.
    assert outcome.trained_at == [list(range(8 * step, 8 * step + 8)) for step in range(40)]


def test_with_dynamic_sampling_early_groups_fill_the_room_and_hard_ones_are_not_left_behind() -> None:
    reports = Reports()
    outcome = simulate(SMALL.with_(without_signal=0.5), reports)
    assert outcome.trained == 8 * 40 and outcome.dropped == outcome.cut == 0
    assert outcome.hardest_fifth >= 0.97 and abs(outcome.length - 1) <= 0.02
    assert outcome.policy_lag_max == 1
    in_order = [position for step in outcome.trained_at for position in step]
    assert in_order != sorted(in_order)
    told = [m["dynamic_sampling/discarded_share"] * m["dynamic_sampling/batches"] * 8 for m in reports.metrics_of]
    # Each is told of once; those since the last step was taken are of the next.
    assert 0.8 * 8 * 40 < sum(told) <= reports.metrics_of[-1]["async/discarded_no_signal"]


def test_a_deadline_bounds_how_long_a_step_waits() -> None:
    waiting, bounded = simulate(SMALL), simulate(SMALL.with_(deadline_s=400.0))
    assert bounded.step_s < waiting.step_s and bounded.cut > 0
    assert bounded.longest_wait_s <= 401.0 < waiting.longest_wait_s
    assert bounded.policy_lag_max == 1


def test_a_step_that_waits_long_says_for_what() -> None:
    reports = Reports()
    outcome = simulate(SMALL.with_(steps=3), reports)
    first = [fields for name, fields in reports.events if name == "waiting_for_groups" and fields["step"] == 1]
    assert [f["waited_s"] for f in first] == pytest.approx([30 * 2**n for n in range(len(first))], abs=1.0)
    for fields in first:
        running = [p for p in range(8) if max(SMALL.seconds(p, 0)) > fields["waited_s"]]
        assert fields["groups"] == len(running) and fields["longest_s"] == fields["waited_s"]
        assert fields["longest"] == f"virtual:{running[0]}"
    waited = [m["async/waited_s"] for m in reports.metrics_of]
    assert waited[0] == max(max(SMALL.seconds(p, 0)) for p in range(8))
    assert sum(waited) == pytest.approx(3 * outcome.step_s * outcome.waited_share)
    assert reports.metrics_of[0]["async/awaited_groups"] == 8
