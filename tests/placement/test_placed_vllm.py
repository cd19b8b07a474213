"""vLLM in an actor: it is built, stepped and reloaded in the worker's decoding thread."""

from __future__ import annotations

import pytest

from nemotron_steps.engine.grpo import train
from tests.benchmarks.grpo_task import large_prompts, make_large_checkpoint, write_rows
from tests.engine.grpo_runs import metrics_of
from tests.placement.conftest import config_of, start


@pytest.mark.ray
@pytest.mark.vllm
def test_a_placed_vllm_engine_follows_the_policy(cluster, tmp_path):
    folder = tmp_path / "model"
    make_large_checkpoint(folder, layers=1, hidden=128)
    write_rows(folder / "train.jsonl", large_prompts(folder, 16, words=8))
    config = config_of(
        folder,
        2,
        cluster__backend="ray",
        policy__generation__backend="vllm",
        policy__generation__vllm_cfg={"enforce_eager": True, "max_num_seqs": 16},
    )
    records = []
    run, _ = start(config, tmp_path, records)
    try:
        train(run)
    finally:
        run.close()
    metrics = metrics_of(records)
    # vLLM's own logprobs are the policy's at the second step too: the new weights arrived.
    assert max(m["token_mult_prob_error"] for m in metrics) < 1 + 1e-3
    assert metrics[-1]["weight_sync/bytes"] > 1e6
