"""A hybrid on FSDP2, through transformers, against the megatron policy."""

from __future__ import annotations

import pytest
import torch

from nemotron_steps.engine.policy.dtensor import DTensorPolicy
from nemotron_steps.engine.policy.megatron import MegatronPolicy
from tests.engine.policy.batches import grouped_batch, policy_config, rl_loss
from tests.models.hybrid_twins import write_hybrid


def test_the_dtensor_policy_trains_hybrids_as_megatron_does(batch, tmp_path):
    """Also where transformers would bound time steps that no generator bounds."""
    write_hybrid("mtp", tmp_path / "hub", initializer_range=0.1, time_step_min=0.5)
    optimizer = {"lr": 1e-3, "weight_decay": 0.1}
    config = policy_config(dtensor_cfg={"enabled": True}, megatron_cfg={"optimizer": optimizer}, max_grad_norm=1e9)
    ours = DTensorPolicy(config, tmp_path / "hub", rl_loss())
    config = policy_config(megatron_cfg={"optimizer": optimizer}, max_grad_norm=1e9)
    theirs = MegatronPolicy(config, tmp_path / "hub", rl_loss())
    torch.testing.assert_close(ours.logprobs(batch), theirs.logprobs(batch), atol=2e-5, rtol=0)
    for seed in range(2):
        found, expected = (policy.train_step(grouped_batch(seed)) for policy in (ours, theirs))
        for name in ("loss", "grad_norm", "entropy"):
            assert found[name] == pytest.approx(expected[name], rel=2e-4, abs=1e-6), name
    weights = {name: tensor.clone() for name, tensor in ours.weights()}
    assert {name: tensor.shape for name, tensor in weights.items()} == {n: t.shape for n, t in theirs.weights()}
    ours.save_model(tmp_path / "megatron")
    opened = MegatronPolicy(config, tmp_path / "megatron", rl_loss())
    assert all(torch.equal(weights[name], tensor) for name, tensor in opened.weights())
    torch.testing.assert_close(opened.logprobs(batch), ours.logprobs(batch), atol=2e-5, rtol=0)
    assert (tmp_path / "megatron" / "hf" / "carried.safetensors").is_file()
