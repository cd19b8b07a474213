"""The asynchronous loop reaches the held-out reward that the synchronous one reaches."""

from __future__ import annotations

import asyncio
import statistics

import pytest

from benchmarks.grpo_task import prompts, write_rows
from nemotron_steps.engine.grpo.loop import evaluate_heldout
from nemotron_steps.engine.rollouts.data import read_rows
from nemotron_steps.engine.types import SamplingParams
from tests.engine.grpo.grpo_runs import config_of, run_loop, start

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
