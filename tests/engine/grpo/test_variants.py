"""What the loop may do besides, for real: router replay, and sampling with temperature, top-k and top-p."""

import pytest

from tests.engine.grpo.grpo_runs import config_of, metrics_of, run_loop, start, write_hybrid_for

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


@pytest.mark.parametrize(
    ("sampling", "dtensor"),
    [
        ({"temperature": 0.5}, False),
        ({"top_p": 0.7}, False),
        ({"temperature": 1.4, "top_k": 12, "top_p": 0.9}, False),
        ({"temperature": 1.4, "top_k": 12, "top_p": 0.9}, True),
    ],
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
