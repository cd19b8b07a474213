"""At full rank adapters are what whole training is: exactly where the mathematics says so, and nearly elsewhere."""

from __future__ import annotations

import pytest
import torch

from nemotron_steps.engine.losses.loss import count_normalizers
from nemotron_steps.engine.losses.supervised import NegativeLogLikelihood
from nemotron_steps.engine.policy.lora import LowRank
from nemotron_steps.engine.policy.megatron import MegatronPolicy
from tests.engine.policy.batches import grouped_batch, policy_config, rl_loss
from tests.engine.policy.test_lora import lora_config
from tests.models.checkpoints import write_checkpoint

RATE = 0.05


def gradients(policy, batch):
    """Parameter name in the whole model → its gradient."""
    policy.optimizer.zero_gradients()
    policy._accumulate(batch, count_normalizers(batch))
    return {n: g.clone() for buffer in policy.buffers for n, g in buffer.unflatten(buffer.grads).items()}


def test_with_an_orthogonal_a_gradient_descent_on_b_is_gradient_descent_on_the_weight(qwen3_folder):
    """dL/dB = s G Aᵀ for the weight's gradient G, so that B's step moves the weight by s² G Aᵀ A = s² G."""
    adapted = MegatronPolicy(lora_config(dim=64, alpha=64, target_modules=["linear_proj"]), qwen3_folder, rl_loss())
    whole = MegatronPolicy(policy_config(), qwen3_folder, rl_loss())
    torch.manual_seed(0)
    for module in adapted.model.modules():
        if isinstance(module, LowRank):
            torch.nn.init.orthogonal_(module.linear_in.weight.data)
    before = {name: tensor.clone() for name, tensor in whole.weights()}
    for seed in range(3):
        batch = grouped_batch(seed)
        for policy, part in ((adapted, ".linear_out."), (whole, "linear_proj.weight")):
            for name, gradient in gradients(policy, batch).items():
                if part in name:
                    policy.shards.local[name].data.sub_(RATE * gradient)
    moved = 0.0
    for (name, mine), (_, theirs) in zip(adapted.weights(), whole.weights(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=0, msg=name)
        moved = max(moved, float((theirs - before[name]).abs().max()))
    assert moved > 1e-3


def trained(config, folder, batches, *, linears_alone=False, steps=40):
    """Losses of some steps; with `linears_alone`, embeddings and norms are put back after each."""
    policy = MegatronPolicy(config, folder, NegativeLogLikelihood())
    others = {n: t for n, t in policy.shards.local.items() if ".linear_" not in n} if linears_alone else {}
    started = {name: tensor.detach().clone() for name, tensor in others.items()}
    losses = []
    for step in range(steps):
        losses.append(policy.train_step(batches[step % len(batches)])["loss"])
        for name, tensor in others.items():
            tensor.data.copy_(started[name])
    return losses


def last(losses):
    return losses[-1]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_full_rank_adapters_reach_the_loss_of_training_the_same_matrices_whole(seed, tmp_path):
    """To a twentieth of what the loss falls by, each at the better of two learning rates for it."""
    write_checkpoint("qwen3", tmp_path, seed=seed, initializer_range=0.1)
    batches = [grouped_batch(10 * seed + number) for number in range(2)]
    whole, full, narrow = (
        min((trained(kind({"lr": lr, "weight_decay": 0.0}), tmp_path, batches, **how) for lr in (2e-3, 1e-2)), key=last)
        for kind, how in (
            (lambda optimizer: policy_config(megatron_cfg={"optimizer": optimizer}), {"linears_alone": True}),
            (lambda optimizer: lora_config(optimizer, dim=64, alpha=64), {}),
            (lambda optimizer: lora_config(optimizer, dim=1, alpha=1), {}),
        )
    )
    fell = whole[0] - whole[-1]
    assert full[0] == pytest.approx(whole[0], abs=1e-4)
    assert full[-1] < whole[-1] + fell / 20 < narrow[-1]
