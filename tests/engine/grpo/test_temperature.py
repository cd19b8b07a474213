"""Rollouts sampled at a temperature are trained on with the logprobs of that temperature."""

from __future__ import annotations

import pytest

from tests.engine.grpo.grpo_runs import config_of, metrics_of, run_loop, start


@pytest.mark.parametrize("dtensor", [False, True])
@pytest.mark.parametrize("temperature", [0.5, 1.4])
def test_policy_and_generator_agree_about_tokens_sampled_at_a_temperature(task, tmp_path, temperature, dtensor):
    config = config_of(
        task,
        2,
        policy__generation__temperature=temperature,
        policy__dtensor_cfg={"enabled": dtensor},
        policy__megatron_cfg={} if dtensor else {"optimizer": {"lr": 2e-3}},
        policy__optimizer={"kwargs": {"lr": 2e-3}} if dtensor else None,
        grpo__seq_logprob_error_threshold=1.01,
    )
    records = []
    run_loop(start(config, tmp_path, records))
    assert len(metrics_of(records)) == 2
    for metrics in metrics_of(records):
        assert metrics["token_mult_prob_error"] < 1.0005
        assert metrics["seq_logprob_error/masked_share"] == 0.0
