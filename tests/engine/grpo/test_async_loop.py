"""The asynchronous loop for real: it learns, resumes, keeps its bounds, and ends when something is dead."""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
from collections import Counter
from types import SimpleNamespace

import pytest

from nemotron_steps.engine.generation import sampler
from nemotron_steps.engine.grpo.async_loop import train_async
from nemotron_steps.engine.grpo.buffer import MAX_FAILURES
from nemotron_steps.engine.rollouts import failures as patience
from nemotron_steps.engine.rollouts.data import read_rows
from nemotron_steps.errors import DataError, EngineError, JudgeUnavailableError, WorkerLostError
from tests.engine.grpo.grpo_environments import Marked
from tests.engine.grpo.grpo_runs import config_of, marked, metrics_of, run_loop, start, stop_after

ASYNC = {"grpo__async_grpo__enabled": True}
CORRECTED = {
    **ASYNC,
    "loss_fn__use_importance_sampling_correction": True,
    "loss_fn__truncated_importance_sampling_type": "tis",
    "loss_fn__truncated_importance_sampling_ratio": 5,
}
ANY_TOKEN = tuple(range(3, 259))
"""Every answer ends after a token, so that the environment is asked whether the conversation goes on."""


def events_of(records, name):
    return [r["fields"] for r in records if r["kind"] == "event" and r["name"] == name]


def sampled_dynamically(task, steps, asynchronous, **changes):
    return config_of(
        task,
        steps,
        grpo__async_grpo__enabled=asynchronous,
        grpo__use_dynamic_sampling=True,
        grpo__max_num_epochs=1,
        data__shuffle=False,
        environment="marked",
        **changes,
    )


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


def test_nothing_is_sampled_any_more_once_the_last_step_is_trained(task, tmp_path):
    config = config_of(task, 2, **ASYNC, grpo__val_at_end=True, policy__generation__max_sequences=8)
    run = start(config, tmp_path)
    run.validation = read_rows(task / "train.jsonl")[:1]  # the groups issued meanwhile begin to be sampled
    with asyncio.Runner() as runner:
        train_async(run, runner)
    assert not run.sampler.busy and run.generator.pending() == 0


def test_generation_goes_on_while_a_checkpoint_is_written(task, tmp_path):
    run = start(config_of(task, 5, **ASYNC, checkpointing__save_period=1), tmp_path)
    save, sampled = run.policy.save_checkpoint, []

    def slow(path):
        before, deadline = run.generator.sampled_tokens, time.monotonic() + 20
        while run.step <= 3 and run.generator.sampled_tokens == before and time.monotonic() < deadline:
            time.sleep(0.01)
        sampled.append(run.generator.sampled_tokens - before)
        save(path)

    run.policy.save_checkpoint = slow
    run_loop(run)
    assert len(sampled) == 5 and min(sampled[:3]) > 0  # for the last steps everything may be sampled already


def test_checkpoints_resume_without_losing_or_repeating_a_prompt(task, tmp_path):
    config = config_of(task, 6, **ASYNC, checkpointing__save_async=True)
    records = []
    broken = start(config, tmp_path, [])
    stop_after(broken, 4)
    with pytest.raises(KeyboardInterrupt):
        run_loop(broken)
    state = json.loads((tmp_path / "checkpoints" / "step_00000003" / "state.json").read_text())
    assert state["buffer"]["counts"]["taken"] == 3 * 4
    assert run_loop(start(config, tmp_path, records))["steps"] == 6
    assert metrics_of(records)[-1]["async/taken"] == 6 * 4


@pytest.mark.parametrize("changes", [{}, ASYNC], ids=["synchronous", "asynchronous"])
def test_what_a_checkpoint_holds_has_been_reported_whenever_the_kill_comes(changes, task, tmp_path):
    run = start(config_of(task, 6, **changes, checkpointing__save_period=2), tmp_path, records := [])
    save = run.checkpoints.save

    def killed_after_the_commit(step, *arguments, **options):
        save(step, *arguments, **options)
        if step == 4:
            raise KeyboardInterrupt

    run.checkpoints.save = killed_after_the_commit
    with pytest.raises(KeyboardInterrupt):
        run_loop(run)
    again = []
    run_loop(start(config_of(task, 6, **changes, checkpointing__save_period=2), tmp_path, again))
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


def test_dynamic_sampling_replaces_groups_without_a_signal_and_keeps_what_is_left_over(task, tmp_path):
    records = []
    config = config_of(
        task,
        8,
        **ASYNC,
        grpo__use_dynamic_sampling=True,
        grpo__num_generations_per_prompt=2,
        environment="any_vowel",
    )
    run_loop(start(config, tmp_path, records))
    metrics = metrics_of(records)
    assert len(metrics) == 8 and max(m["policy_lag/max"] for m in metrics) <= 1
    assert all(m["groups/zero_std_share"] == 0 for m in metrics)
    assert max(m["dynamic_sampling/discarded_share"] for m in metrics) > 0
    last = metrics[-1]
    accounted = last["async/taken"] + last["async/discarded_no_signal"] + last["async/ready"] + last["async/in_flight"]
    assert last["async/issued"] == accounted


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_prompts_that_end_with_a_full_step_before_the_last_one_are_said_to_be_used_up(asynchronous, task, tmp_path):
    config = sampled_dynamically(task, 9, asynchronous, checkpointing__save_period=1)
    rows = marked(read_rows(task / "train.jsonl")[:8], differs=[True, False] * 4)
    for _ in range(2):  # a resumed run says it again
        with pytest.raises(DataError, match="used up the prompts") as caught:
            run_loop(start(config, tmp_path, [], rows))
        assert caught.value.hints[0] == "grpo.max_num_epochs=2"
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_00000001"]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_prompts_of_which_none_has_a_signal_are_not_asked_again_or_trained_on_without_one(asynchronous, task, tmp_path):
    config = sampled_dynamically(task, 9, asynchronous)
    rows = read_rows(task / "train.jsonl")[:8]
    with pytest.raises(DataError, match="used up the prompts") as caught:
        run_loop(start(config, tmp_path, [], marked(rows, differs=[False] * 8)))
    assert caught.value.hints[0].startswith("grpo.num_generations_per_prompt=")
    assert not any("epochs" in hint or "dynamic_sampling" in hint for hint in caught.value.hints)


def test_dynamic_sampling_gives_up_when_no_group_has_a_signal(task, tmp_path):
    changes = {"grpo__use_dynamic_sampling": True, "environment": "indifferent"}
    with pytest.raises(EngineError, match="found 0 groups with differing rewards in 10 batches"):
        run_loop(start(config_of(task, 2, **ASYNC, **changes), tmp_path))


def test_waiting_for_what_is_in_flight_gives_up_as_soon_as_dynamic_sampling_may_ask_no_more(task, tmp_path):
    changes = {"grpo__async_grpo__in_flight_weight_updates": False, "grpo__dynamic_sampling_max_gen_batches": 3}
    rows = marked(read_rows(task / "train.jsonl"), differs=[True] * 4 + [False] * 124)
    with pytest.raises(EngineError, match="found 0 groups with differing rewards in 3 batches"):
        run_loop(start(sampled_dynamically(task, 3, True, **changes), tmp_path, rows=rows))


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


def test_a_run_whose_prompts_are_used_up_keeps_the_checkpoint_that_is_still_being_written(task, tmp_path):
    rows = read_rows(task / "train.jsonl")
    stuck = [r for r in rows if "x" in r.row["responses_create_params"]["input"][0]["content"]][:1]
    fine = [r for r in rows if "x" not in r.row["responses_create_params"]["input"][0]["content"]][:7]
    config = config_of(
        task,
        30,
        **ASYNC,
        environment="stuck",
        grpo__max_num_epochs=1,
        grpo__max_rollout_turns=2,
        policy__generation__stop_token_ids=ANY_TOKEN,
        grpo__async_grpo__straggler_deadline_s=0.1,
        checkpointing__save_period=1,
        checkpointing__save_async=True,
    )
    run = start(config, tmp_path, records := [], stuck + fine)
    snapshot = run.policy.snapshot

    def slow():
        taken = snapshot()
        return SimpleNamespace(write=lambda path: (written.wait(60), taken.write(path)))

    written = threading.Event()
    run.policy.snapshot = slow
    event = run.reporter.event

    def told(name, **fields):
        event(name, **fields)
        if name == "prompts_used_up":
            threading.Timer(0.3, written.set).start()

    run.reporter.event = told
    assert run_loop(run)["steps"] == 1
    state = json.loads((tmp_path / "checkpoints" / "step_00000001" / "state.json").read_text())
    assert state["metrics"]["reward/mean"] == metrics_of(records)[0]["reward/mean"]
    assert len(events_of(records, "checkpoint")) == 1


def test_when_every_prompt_fails_the_run_says_so(task, tmp_path):
    config = config_of(
        task,
        30,
        **ASYNC,
        environment="stuck_everywhere",
        grpo__max_num_epochs=1,
        grpo__max_rollout_turns=2,
        policy__generation__stop_token_ids=ANY_TOKEN,
        grpo__async_grpo__straggler_deadline_s=0.1,
    )
    with pytest.raises(DataError, match="no step can be filled") as caught:
        run_loop(start(config, tmp_path, rows=read_rows(task / "train.jsonl")[:8]))
    assert "failed 3 times" in str(caught.value)


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
def test_a_judge_that_neither_answers_nor_gives_up_is_a_lost_worker(changes, task, tmp_path, monkeypatch):
    monkeypatch.setattr(patience, "ENVIRONMENT_SECONDS", 0.5)
    with pytest.raises(WorkerLostError, match="24 of 32 rollouts failed") as caught:
        run_loop(start(config_of(task, 2, **changes, environment="hanging"), tmp_path))
    assert caught.value.where.startswith("environment `hanging`, row ")
    assert "hanging.judge_group" in caught.value.found and "has not answered" in caught.value.found


@pytest.mark.parametrize("changes", [{}, ASYNC], ids=["synchronous", "asynchronous"])
def test_a_judge_that_is_down_is_an_error_or_a_masked_sample_and_never_a_reward_of_zero(changes, task, tmp_path):
    with pytest.raises(JudgeUnavailableError, match="judge"):
        run_loop(start(config_of(task, 2, **changes, environment="silent"), tmp_path / "down"))
    records = []
    run_loop(start(config_of(task, 3, **changes, environment="unreliable"), tmp_path / "unreliable", records))
    for metrics in metrics_of(records):
        assert 0 < metrics["failures/judge_unavailable"] < 1
        assert metrics["reward/mean"] >= 1 and math.isfinite(metrics["loss"])


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_dynamic_sampling_says_that_the_judge_is_down_and_does_not_discard_its_prompts(asynchronous, task, tmp_path):
    config = config_of(
        task, 2, grpo__use_dynamic_sampling=True, environment="silent", grpo__async_grpo__enabled=asynchronous
    )
    with pytest.raises(JudgeUnavailableError, match="the judge does not answer: no rollout of 4 prompts"):
        run_loop(start(config, tmp_path, []))


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_prompts_that_a_judge_was_down_for_are_tried_again_and_its_failures_are_counted(
    asynchronous, task, tmp_path, monkeypatch
):
    monkeypatch.setattr(Marked, "asked", Counter())
    rows = read_rows(task / "train.jsonl")[:16]
    silent = [0, 1, 1, 99] + [0] * 12  # two are answered the second time, one never
    records = []
    run = start(
        sampled_dynamically(task, 3, asynchronous),
        tmp_path,
        records,
        marked(rows, number=range(16), differs=[True] * 16, silent=silent),
    )
    assert run_loop(run)["steps"] == 3
    assert [Marked.asked[i] for i in range(4)] == [1, 2, 2, MAX_FAILURES]
    (dropped,) = events_of(records, "prompt_dropped")
    assert dropped["where"] == rows[3].where and dropped["failures"] == MAX_FAILURES
    metrics = metrics_of(records)
    assert sum(m["dynamic_sampling/ungraded_groups"] for m in metrics) == 2 + MAX_FAILURES
    assert all(m["reward/mean"] == 0.5 for m in metrics)
    if asynchronous:  # each step counts the failures since the one before, and those alone
        for each in metrics:
            ungraded = 8 * each["dynamic_sampling/ungraded_groups"]
            assert each["failure_rate"] == pytest.approx(ungraded / (4 * 8 + ungraded))
    if not asynchronous:  # there, groups of the next step may be among the first one's
        first = metrics[0]
        # Five groups without verdicts, four that were trained, and three of the surplus.
        assert first["failures/judge_unavailable"] == first["failure_rate"] == 5 / 12
    assert "judge_unavailable" in {r["name"] for r in records if r["kind"] == "signal"}


def test_a_judge_that_stops_answering_in_the_middle_of_a_step_ends_the_run_before_it_uses_up_the_prompts(
    task, tmp_path, monkeypatch
):
    monkeypatch.setattr(Marked, "asked", Counter())
    rows = marked(read_rows(task / "train.jsonl"), number=range(128), differs=[True] * 128, silent=[0] + [99] * 127)
    with pytest.raises(JudgeUnavailableError, match="no rollout of 4 prompts in a row"):
        run_loop(start(sampled_dynamically(task, 2, False), tmp_path, [], rows))
    assert len(Marked.asked) < 10  # prompts are not used up on it


def test_the_first_policy_is_validated_where_that_is_asked_for(task, tmp_path):
    records = []
    run = start(config_of(task, 1, **ASYNC, grpo__val_at_start=True), tmp_path, records)
    run.validation = read_rows(task / "train.jsonl")[:2]
    run_loop(run)
    validated = [record["index"] for record in records if "validation/reward" in record.get("values", ())]
    assert validated == [0]
