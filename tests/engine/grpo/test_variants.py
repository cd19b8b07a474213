"""What the loop may do besides, for real: multi-token prediction, router replay, top-k; and both loops agree."""

from __future__ import annotations

import asyncio
import statistics
from statistics import fmean

import pytest

from benchmarks.grpo_task import prompts, write_rows
from nemotron_steps.engine.grpo.loop import evaluate_heldout
from nemotron_steps.engine.rollouts.data import read_rows
from nemotron_steps.engine.types import SamplingParams
from tests.engine.grpo.grpo_runs import config_of, metrics_of, run_loop, start, write_hybrid_for


@pytest.fixture(scope="module")
def hybrid(task, tmp_path_factory):
    """A Nemotron-H with a block of multi-token prediction, and the tokenizer and prompts of the task."""
    return write_hybrid_for(task, "mtp", tmp_path_factory.mktemp("predicting") / "hybrid")


def trained(hybrid, work, **megatron):
    records: list[dict] = []
    changes = {"policy__megatron_cfg": {"optimizer": {"lr": 2e-3}, **megatron}, "checkpointing__enabled": False}
    run = start(config_of(hybrid, 8, environment="vowels", **changes), work, records)
    run_loop(run)
    run.close()
    return metrics_of(records)


def test_its_loss_falls_and_the_reward_is_what_it_is_without(hybrid, tmp_path):
    plain = trained(hybrid, tmp_path / "plain")
    settings = {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 1.0, "mtp_detach_heads": True}
    along = trained(hybrid, tmp_path / "along", **settings)
    rewards = [[values["reward/mean"] for values in steps] for steps in (plain, along)]
    assert fmean(rewards[0][-2:]) > fmean(rewards[0][:2]) + 0.05
    assert rewards[1] == pytest.approx(rewards[0], abs=0.02)  # detached, the same policy but for rounding
    losses = [values["mtp_1_loss"] for values in along]
    assert fmean(losses[-2:]) < fmean(losses[:2]) - 0.1
    assert not [name for name in plain[0] if "mtp" in name]


REPLAYED = {"policy__router_replay__enabled": True, "checkpointing__enabled": False}


@pytest.fixture(scope="module")
def mixture(task, tmp_path_factory):
    """A Nemotron-H with experts, and the tokenizer and prompts of the task."""
    return write_hybrid_for(task, "latent", tmp_path_factory.mktemp("replayed") / "mixture")


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_every_trained_token_has_the_experts_of_its_generation(asynchronous, mixture, tmp_path):
    changes = {"grpo__async_grpo__enabled": True} if asynchronous else {}
    records: list[dict] = []
    run = start(config_of(mixture, 2, environment="vowels", **REPLAYED, **changes), tmp_path, records)
    run_loop(run)
    run.close()
    steps = metrics_of(records)
    assert len(steps) == 2
    for values in steps:
        assert values["router_replay_share"] == 1
        assert 0 <= values["router_replay_mismatch"] < 0.5


@pytest.mark.ray
@pytest.mark.timeout(180)
def test_experts_travel_between_processes(mixture, tmp_path, cluster):
    """Generators in actors, and two pipeline stages with the experts of one layer each."""
    records: list[dict] = []
    changes = {
        "policy__megatron_cfg": {"optimizer": {"lr": 2e-3}, "pipeline_model_parallel_size": 2},
        "cluster": {"backend": "ray", "policy_workers": 2},
    }
    run = start(config_of(mixture, 1, environment="vowels", **REPLAYED, **changes), tmp_path, records)
    try:
        run_loop(run)
    finally:
        run.close()
    (values,) = metrics_of(records)
    assert values["router_replay_share"] == 1 and values["router_replay_mismatch"] < 0.05


@pytest.mark.parametrize("dtensor", [False, True])
@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0.5}, {"temperature": 1.4}, {"top_p": 0.7}, {"temperature": 1.4, "top_k": 12, "top_p": 0.9}],
    ids=str,
)
def test_policy_and_generator_agree_about_the_tokens_that_were_sampled(task, tmp_path, sampling, dtensor):
    config = config_of(
        task,
        2,
        **{f"policy__generation__{key}": value for key, value in sampling.items()},
        policy__dtensor_cfg={"enabled": dtensor},
        policy__megatron_cfg={} if dtensor else {"optimizer": {"lr": 2e-3}},
        policy__optimizer={"kwargs": {"lr": 2e-3}} if dtensor else None,
        grpo__seq_logprob_error_threshold=1.01,
    )
    records = []
    run_loop(start(config, tmp_path, records))
    assert len(metrics_of(records)) == 2
    for metrics in metrics_of(records):
        assert metrics["token_mult_prob_error"] == pytest.approx(1, abs=5e-4)
        assert metrics["seq_logprob_error/masked_share"] == 0.0
        assert metrics.get("outside_truncation", 0.0) < 0.002  # a token at the edge may be on either side


SEEDS = (1, 2, 3)
STEPS = 18
LOOPS = {
    "synchronous": {},
    "asynchronous": {
        "grpo__async_grpo__enabled": True,
        "loss_fn__truncated_importance_sampling_type": "tis",
        "loss_fn__truncated_importance_sampling_ratio": 5,
    },
}


def heldout_reward(run, rows) -> float:
    run.collector.params = SamplingParams(max_new_tokens=16, seed=0)
    return asyncio.run(evaluate_heldout(run, rows, "test")).reward


@pytest.mark.slow
def test_three_seeds_of_each_loop_end_at_the_same_heldout_reward(task, tmp_path):
    write_rows(tmp_path / "heldout.jsonl", prompts(32, seed=99))
    rows = read_rows(tmp_path / "heldout.jsonl")
    before, after = [], {name: [] for name in LOOPS}
    for name, changes in LOOPS.items():
        for seed in SEEDS:
            config = config_of(
                task,
                STEPS,
                grpo__seed=seed,
                loss_fn__use_importance_sampling_correction=True,
                checkpointing__enabled=False,
                heldout__samples_per_prompt=8,
                **changes,
            )
            run = start(config, tmp_path / f"{name}-{seed}")
            before.append(heldout_reward(run, rows))
            run_loop(run)
            after[name].append(heldout_reward(run, rows))
    means = {name: statistics.mean(rewards) for name, rewards in after.items()}
    spread = max(max(rewards) - min(rewards) for rewards in after.values())
    assert abs(means["synchronous"] - means["asynchronous"]) <= max(spread, 0.05), after
    assert min(min(rewards) for rewards in after.values()) > 5 * max(before), (before, after)
