"""GRPO of a small hybrid whose block of multi-token prediction is trained along, from config to metrics."""

from __future__ import annotations

from statistics import fmean

import pytest

from tests.engine.grpo.grpo_runs import config_of, metrics_of, run_loop, start, write_hybrid_for

STEPS = 8


@pytest.fixture(scope="module")
def hybrid(task, tmp_path_factory):
    """A Nemotron-H with a block of multi-token prediction, and the tokenizer and prompts of the task."""
    return write_hybrid_for(task, "mtp", tmp_path_factory.mktemp("predicting") / "hybrid")


def trained(hybrid, work, **megatron):
    records: list[dict] = []
    changes = {"policy__megatron_cfg": {"optimizer": {"lr": 2e-3}, **megatron}, "checkpointing__enabled": False}
    run = start(config_of(hybrid, STEPS, environment="vowels", **changes), work, records)
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
