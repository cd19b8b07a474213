"""Mixtures of experts: the frozen float32 router, and balancing by bias."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from nemotron_steps.engine.policy.megatron import MegatronPolicy
from nemotron_steps.engine.policy.moe import Router, counting
from tests.engine.policy.batches import grouped_batch, policy_config, rl_loss
from tests.models.checkpoints import write_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moe") / "qwen3_moe"
    write_checkpoint("qwen3_moe", folder, initializer_range=0.1)
    return folder


def moe_policy(folder, precision="float32", **megatron):
    config = policy_config(precision=precision, megatron_cfg={"optimizer": {"lr": 1e-2}, **megatron})
    return MegatronPolicy(config, folder, rl_loss(), reference=True)


def routers(policy):
    return {name: tensor.clone() for name, tensor in policy.weights() if name.endswith("mlp.gate.weight")}


def test_a_frozen_router_keeps_every_digit(folder, batch):
    policy = moe_policy(folder, precision="bfloat16", freeze_moe_router=True)
    before = routers(policy)
    assert before and all(tensor.dtype is torch.float32 for tensor in before.values())
    policy.train_step(batch)
    after = routers(policy)
    assert all(torch.equal(before[name], after[name]) for name in before)
    trained = moe_policy(folder)
    trained.train_step(batch)
    assert not any(torch.equal(before[name], tensor) for name, tensor in routers(trained).items())


def test_biases_even_out_the_load_without_a_gradient(folder, tmp_path):
    rate = 0.002
    policy = moe_policy(folder, moe_router_bias_update_rate=rate, freeze_moe_router=True)
    policy._scheduler = policy._scheduler.model_copy(update={"lr_warmup_iters": 10**9})  # weights as good as fixed
    batch = grouped_batch(seed=3)
    start = policy.logprobs(batch)
    loads = []
    for _ in range(40):
        original = policy.model.routers()[0].rebalance

        def watch(*arguments, rebalance=original):
            loads.append(policy.model.routers()[0].load.clone())
            rebalance(*arguments)

        policy.model.routers()[0].rebalance = watch
        policy.train_step(batch)
        policy.model.routers()[0].rebalance = original
    spread = [float(load.std() / load.mean()) for load in loads]
    assert max(spread[-5:]) < 0.5 * spread[0]
    bias = dict(policy.weights())["model.layers.0.mlp.gate.e_score_correction_bias"]
    steps = bias / rate
    assert float(bias.abs().max()) > 0 and torch.allclose(steps, steps.round(), atol=1e-3)
    assert torch.equal(policy.reference_logprobs(batch), start)  # the reference has the starting biases as well

    policy.save_checkpoint(str(tmp_path / "step"))
    resumed = moe_policy(folder, moe_router_bias_update_rate=rate, freeze_moe_router=True)
    resumed.load_checkpoint(str(tmp_path / "step"))
    assert torch.equal(resumed.logprobs(batch), policy.logprobs(batch))
    policy.save_model(tmp_path / "model")
    reopened = moe_policy(tmp_path / "model", moe_router_bias_update_rate=rate)
    assert torch.equal(reopened.logprobs(batch), policy.logprobs(batch))


@pytest.mark.parametrize("rounding", [1, 64])
def test_rows_are_padded_to_their_multiple_and_no_expert_is_loaded_with_padding(folder, batch, rounding):
    config = policy_config(
        sequence_packing={"enabled": True, "train_mb_tokens": 150, "sequence_length_round": rounding},
        megatron_cfg={"optimizer": {"lr": 1e-2}, "moe_router_bias_update_rate": 0.1},
    )
    policy = MegatronPolicy(config, folder, rl_loss())
    work = policy._work(batch, range(len(batch)), train=True)
    layouts = [work.layout(number) for number in range(work.count)]
    assert all(len(layout.token_ids) % rounding == 0 for layout in layouts)
    assert any(layout.padding for layout in layouts) == (rounding > 1)
    with counting(policy.model.routers()):
        for layout in layouts:
            policy.model(layout)
    router = policy.model.routers()[0]
    assert int(router.load.sum()) == int((batch.lengths - 1).sum()) * router.top_k  # last tokens predict nothing


def test_biases_that_no_generator_knows_are_refused_where_rollouts_are_sampled(folder, tmp_path):
    from nemotron_steps.config.schema.rl import RlConfig
    from nemotron_steps.engine.placement.run import place
    from nemotron_steps.errors import ConfigError

    policy = {"checkpoint": str(folder), "megatron_cfg": {"moe_router_bias_update_rate": 1e-3}}
    config = RlConfig.model_validate({"policy": policy})
    with pytest.raises(ConfigError, match="no generator knows the biases"):
        place(config, SimpleNamespace(hf_folder=folder))


@pytest.fixture
def loads(monkeypatch):
    """Of each rebalancing: how often the experts of one router were taken."""
    counted = []
    rebalance = Router.rebalance
    monkeypatch.setattr(
        Router, "rebalance", lambda router, *at: (counted.append(router.load.clone()), rebalance(router, *at))
    )
    return counted


@pytest.mark.parametrize("again", [False, True], ids=["kept", "computed again"])
def test_every_kept_row_loads_the_experts_once_whatever_its_advantage(again, folder, batch, loads):
    """Groups whose rewards tie have no gradient, and load the experts like the others."""
    policy = moe_policy(folder, moe_router_bias_update_rate=0.01, activation_checkpointing=again)
    for advantages in (batch.advantages, torch.zeros_like(batch.advantages)):
        policy.train_step(dataclasses.replace(batch, advantages=advantages))
    kept = batch.sample_mask > 0
    tokens = int((batch.lengths - 1)[kept].sum())  # last tokens predict nothing
    assert kept.any()
    assert {int(load.sum()) for load in loads} == {tokens * policy.architecture.experts_per_token}
    assert all(router.expert_bias.any() for router in policy.model.routers())
