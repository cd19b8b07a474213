"""The asynchronous loop for real: it learns, resumes, keeps its bounds, and ends when something is dead."""

import math

import pytest

from benchmarks.bench_async_fairness import Reports, Workload, simulate
from benchmarks.kill_async import PROMPTS, kill_until_done
from nemotron_steps.engine.generation import sampler
from nemotron_steps.engine.grpo.buffer import MAX_FAILURES
from nemotron_steps.engine.rollouts.data import read_rows
from nemotron_steps.errors import JudgeUnavailableError, WorkerLostError
from tests.engine.grpo.grpo_runs import config_of, events_of, metrics_of, run_loop, start, stop_after

ASYNC = {"grpo__async_grpo__enabled": True}
CORRECTED = {
    **ASYNC,
    "loss_fn__use_importance_sampling_correction": True,
    "loss_fn__truncated_importance_sampling_type": "tis",
    "loss_fn__truncated_importance_sampling_ratio": 5,
}
ANY_TOKEN = tuple(range(3, 259))
"""Every answer ends after a token, so that the environment is asked whether the conversation goes on."""


def test_it_learns_and_never_trains_on_tokens_older_than_the_bound(task, tmp_path):
    records = []
    run_loop(start(config_of(task, 14, **CORRECTED), tmp_path, records))
    metrics = metrics_of(records)
    rewards = [m["reward/mean"] for m in metrics]
    assert len(rewards) == 14
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.04
    assert max(m["policy_lag/max"] for m in metrics) <= 1
    generated = sum(m["tokens/generated_per_s"] * m["timing/step_s"] for m in metrics)
    assert 0 < generated < 1.5 * 14 * 4 * 8 * 16  # each step counts its own; no answer is longer than 16


def test_what_a_checkpoint_holds_has_been_reported_whenever_the_kill_comes(task, tmp_path):
    """Of the synchronous loop; the other is killed below."""
    run = start(config_of(task, 6, checkpointing__save_period=2), tmp_path, records := [])
    save = run.checkpoints.save

    def killed_after_the_commit(step, *arguments, **options):
        save(step, *arguments, **options)
        if step == 4:
            raise KeyboardInterrupt

    run.checkpoints.save = killed_after_the_commit
    with pytest.raises(KeyboardInterrupt):
        run_loop(run)
    again = []
    run_loop(start(config_of(task, 6, checkpointing__save_period=2), tmp_path, again))
    for kind, count in (("metrics", 1), ("groups", 1), ("sample", 2)):
        steps = [
            r["sample"]["step"] if kind == "sample" else r["index"] for r in [*records, *again] if r["kind"] == kind
        ]
        assert steps == [step for step in range(1, 7) for _ in range(count)], kind
    prompts = [group["prompt"] for r in [*records, *again] if r["kind"] == "groups" for group in r["groups"]]
    assert len(prompts) == len(set(prompts)) == 6 * 4


@pytest.mark.parametrize(
    "changes",
    [{}, {"grpo__use_dynamic_sampling": True, "grpo__num_generations_per_prompt": 2, "environment": "any_vowel"}],
    ids=["plain", "dynamic_sampling"],
)
def test_without_updates_in_flight_a_resumed_run_is_bit_identical_to_an_unbroken_one(changes, task, tmp_path):
    """With them, which token is sampled by which weights depends on time, and no two runs are equal."""
    config = config_of(task, 6, **ASYNC, grpo__async_grpo__in_flight_weight_updates=False, **changes)
    whole, second = [], []
    run_loop(start(config, tmp_path / "whole", whole))
    broken = start(config, tmp_path / "broken", [])
    stop_after(broken, 4)
    with pytest.raises(KeyboardInterrupt):
        run_loop(broken)
    run_loop(start(config, tmp_path / "broken", second))
    assert len(metrics_of(whole)) == 6 and len(metrics_of(second)) == 3
    for name in ("loss", "grad_norm", "reward/mean", "policy_lag/max"):
        assert [m[name] for m in metrics_of(whole)][3:] == [m[name] for m in metrics_of(second)], name
    assert metrics_of(whole)[-1]["policy_lag/max"] == 1  # it was asynchronous


def test_a_prompt_whose_rollouts_never_end_is_dropped_and_counted(task, tmp_path):
    rows = read_rows(task / "train.jsonl")
    stuck = [r for r in rows if "x" in r.row["responses_create_params"]["input"][0]["content"]][:1]
    fine = [r for r in rows if "x" not in r.row["responses_create_params"]["input"][0]["content"]][:11]
    records = []
    config = config_of(
        task,
        30,
        **ASYNC,
        environment="stuck",
        grpo__max_num_epochs=1,
        grpo__max_rollout_turns=2,
        policy__generation__stop_token_ids=ANY_TOKEN,
        grpo__async_grpo__straggler_deadline_s=0.3,
    )
    summary = run_loop(start(config, tmp_path, records, stuck + fine))
    assert summary["steps"] == 2  # of three: the eleven prompts left fill no third step
    (dropped,) = events_of(records, "prompt_dropped")
    assert dropped["where"] == stuck[0].where and dropped["failures"] == MAX_FAILURES
    assert events_of(records, "prompts_used_up") == [{"step": 2, "dropped": 1}]
    assert [r["index"] for r in records if r["kind"] == "groups"] == [1, 2, 3]  # the third is never trained
    again = []
    assert run_loop(start(config, tmp_path, again, stuck + fine))["steps"] == 2  # and a resumed run knows that
    assert not events_of(again, "prompt_dropped")  # which the first one said
    assert (tmp_path / "checkpoints" / "step_00000002").is_dir()


@pytest.mark.parametrize("changes", [{}, ASYNC], ids=["synchronous", "asynchronous"])
def test_a_generator_that_stops_sampling_is_a_lost_worker(changes, task, tmp_path, monkeypatch):
    monkeypatch.setattr(sampler, "STALL_SECONDS", 0.3)
    run = start(config_of(task, 6, **changes), tmp_path)
    step = run.generator.step

    def dies() -> list:
        return [] if run.step >= 2 and run.generator.sampled_tokens % 7 == 0 else step()

    run.generator.step = dies
    with pytest.raises(WorkerLostError, match="`policy` has sampled no token"):
        run_loop(run)
    assert run.step >= 2


@pytest.mark.parametrize("changes", [{}, ASYNC], ids=["synchronous", "asynchronous"])
def test_a_judge_that_is_down_is_an_error_or_a_masked_sample_and_never_a_reward_of_zero(changes, task, tmp_path):
    with pytest.raises(JudgeUnavailableError, match="judge"):
        run_loop(start(config_of(task, 2, **changes, environment="silent"), tmp_path / "down"))
    records = []
    run_loop(start(config_of(task, 3, **changes, environment="unreliable"), tmp_path / "unreliable", records))
    shares = [metrics.get("failures/judge_unavailable", 0.0) for metrics in metrics_of(records)]
    assert 0 < max(shares) < 1
    for metrics in metrics_of(records):
        assert metrics["reward/mean"] >= 1 and math.isfinite(metrics["loss"])


def test_a_killed_asynchronous_run_neither_loses_nor_repeats_a_prompt_nor_lacks_a_report(tmp_path):
    steps = 8
    account = kill_until_done(tmp_path, kills=2, steps=steps, dynamic=True, seed=37)
    assert account.lost == account.repeated == []
    assert account.trained == steps * PROMPTS
    assert account.without_metrics == account.without_samples == []
    assert "no_signal" in account.outcomes


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
