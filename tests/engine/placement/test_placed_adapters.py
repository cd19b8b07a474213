"""Adapters under GRPO, in one process and in actors: generators are the policy."""

import pytest

from benchmarks.grpo_task import large_prompts, make_large_checkpoint, write_rows
from nemotron_steps.engine.grpo.loop import train
from tests.engine.grpo.grpo_runs import metrics_of
from tests.engine.placement.conftest import config_of, start

PEFT = {"enabled": True, "dim": 8, "alpha": 16}
VLLM = {
    "policy__generation__backend": "vllm",
    "policy__generation__vllm_cfg": {"enforce_eager": True, "max_num_seqs": 16},
}


DTENSOR = {
    "policy__megatron_cfg": {},
    "policy__dtensor_cfg": {
        "enabled": True,
        "lora_cfg": {**PEFT, "match_all_linear": False, "target_modules": ["q_proj", "v_proj"]},
    },
    "policy__optimizer": {"kwargs": {"lr": 1e-2}},
}


def follows(tmp_path, **changes):
    """Three steps, after each of which the generator's own logprobs are the policy's."""
    folder = tmp_path / "model"
    make_large_checkpoint(folder, layers=1, hidden=128)
    write_rows(folder / "train.jsonl", large_prompts(folder, 24, words=8))
    megatron = {"policy__megatron_cfg__peft": PEFT, "policy__megatron_cfg__optimizer__lr": 1e-2}
    megatron = {} if "policy__dtensor_cfg" in changes else megatron
    records = []
    run, _ = start(config_of(folder, 3, **megatron, **changes), tmp_path, records)
    try:
        train(run)
    finally:
        run.close()
    metrics = metrics_of(records)
    assert len(metrics) == 3 and all(m["grad_norm"] > 0 for m in metrics)
    assert max(m["token_mult_prob_error"] for m in metrics) < 1 + 1e-3


def test_a_generator_in_the_policys_process_follows_its_adapters(tmp_path):
    follows(tmp_path)


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_placed_generators_follow_adapters(cluster, tmp_path):
    follows(tmp_path, cluster__backend="ray")


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_vllm_in_the_policys_process_follows_its_adapters(tmp_path):
    follows(tmp_path, **VLLM)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_vllm_in_a_process_of_its_own_follows_adapters(tmp_path):
    settings = {"enforce_eager": True, "max_num_seqs": 16, "async_engine": True}
    follows(tmp_path, **{**VLLM, "policy__generation__vllm_cfg": settings})


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_vllm_follows_adapters_on_a_part_of_a_fused_module(tmp_path):
    follows(tmp_path, **VLLM, **DTENSOR)
