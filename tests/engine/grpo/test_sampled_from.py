"""Rollouts are trained on with logprobs of the distribution they are sampled from."""

from __future__ import annotations

import pytest

from tests.engine.grpo.grpo_runs import config_of, metrics_of, run_loop, start


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
