"""Checkpoints that two policy actors write while they train."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nemotron_steps.engine.grpo.loop import train
from nemotron_steps.engine.losses.policy_gradient import PolicyGradientLoss
from nemotron_steps.engine.setup.backends import build_policy
from tests.engine.placement.conftest import config_of, start

pytestmark = pytest.mark.ray


def test_ranks_write_their_parts_behind_the_training(cluster, checkpoint, tmp_path):
    config = config_of(
        checkpoint,
        3,
        cluster__backend="ray",
        cluster__policy_workers=2,
        policy__megatron_cfg__tensor_model_parallel_size=2,
        policy__megatron_cfg__optimizer={"lr": 2e-3, "use_distributed_optimizer": True},
        checkpointing={"save_async": True, "save_period": 1, "keep_top_k": None},
    )
    run, _ = start(config, tmp_path)
    try:
        train(run)
        expected = {name: tensor.clone() for name, tensor in run.policy.weights()}
    finally:
        run.close()
    saved = run.checkpoints.all()
    assert [c.step for c in saved] == [1, 2, 3]
    parts = [{p.name: p.read_bytes() for p in Path(c.policy_path, "weights").glob("*.distcp")} for c in saved]
    assert all(len(files) == 2 for files in parts)  # one a rank
    assert parts[0] != parts[1] != parts[2]
    alone = build_policy(
        config_of(checkpoint, 3).policy,
        checkpoint,
        PolicyGradientLoss(config.loss_fn),
        reference=False,
        total_steps=3,
    )
    alone.load_checkpoint(saved[-1].policy_path)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in alone.weights())
