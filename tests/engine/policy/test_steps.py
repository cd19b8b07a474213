"""What an optimizer step does under either policy: its rate, its arithmetic, and when it is not taken."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from nemotron_steps.engine.losses.supervised import NegativeLogLikelihood
from nemotron_steps.engine.policy.dtensor import DTensorPolicy
from nemotron_steps.engine.policy.megatron import MegatronPolicy
from nemotron_steps.errors import NonFiniteLossError
from tests.engine.policy.batches import grouped_batch, policy_config, rl_loss
from tests.engine.policy.ranks import gradients

KINDS = {
    MegatronPolicy: {"adam_beta1": 0.7, "adam_beta2": 0.8, "adam_eps": 1e-2},
    DTensorPolicy: {"betas": [0.7, 0.8], "eps": 1e-2},
}
"""Policy → the optimizer's settings that both are tried with, as its config calls them."""


def policy_of(kind, folder, loss=None, *, scheduler=None, total_steps=None, **optimizer):
    config = config_of(kind, scheduler, **optimizer)
    return kind(config, folder, loss or NegativeLogLikelihood(), total_steps=total_steps)


def config_of(kind, scheduler=None, **optimizer):
    optimizer = {"lr": 1e-2, "weight_decay": 0.2, **optimizer}
    if kind is MegatronPolicy:
        return policy_config(megatron_cfg={"optimizer": optimizer, "scheduler": scheduler or {}})
    more = {"scheduler": scheduler} if scheduler else {}
    return policy_config(dtensor_cfg={"enabled": True}, megatron_cfg={"optimizer": optimizer}, **more)


def gradients_of(policy):
    """Of the last step, by Hugging Face names."""
    if isinstance(policy, MegatronPolicy):
        return dict(gradients(policy))
    return {name: each.grad.full_tensor() for name, each in policy.model.hf.named_parameters()}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_several_steps_are_those_of_torchs_adamw_with_the_same_settings(kind, qwen3_folder):
    policy = policy_of(kind, qwen3_folder, **KINDS[kind])
    twins = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in policy.weights()}
    groups = [
        {"params": [p for p in twins.values() if (p.dim() > 1) is decayed], "weight_decay": 0.2 if decayed else 0.0}
        for decayed in (True, False)
    ]
    adamw = torch.optim.AdamW(groups, lr=1e-2, betas=(0.7, 0.8), eps=1e-2)
    for seed in range(3):
        policy.train_step(grouped_batch(seed))
        for name, gradient in gradients_of(policy).items():  # clipped
            twins[name].grad = gradient.clone()
        adamw.step()
    for name, tensor in policy.weights():
        torch.testing.assert_close(tensor, twins[name].detach(), atol=1e-6, rtol=0)


LINEAR = {"lr_warmup_iters": 2, "lr_decay_style": "linear"}


@pytest.mark.parametrize(
    ("kind", "scheduler", "total_steps", "rates"),
    [
        (MegatronPolicy, {**LINEAR, "lr_decay_iters": 4}, 100, [0.5, 1.0, 1.0, 0.5, 0.0]),
        (MegatronPolicy, LINEAR, 4, [0.5, 1.0, 1.0, 0.5, 0.0]),
        (DTensorPolicy, [{"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.5,
                          "total_iters": 2}}], None, [0.5, 0.75, 1.0, 1.0]),
        (DTensorPolicy, None, 4, [1.0, 1.0]),
    ],
)  # fmt: skip
def test_every_step_has_the_rate_of_its_number(kind, scheduler, total_steps, rates, qwen3_folder):
    policy = policy_of(kind, qwen3_folder, scheduler=scheduler, total_steps=total_steps, weight_decay=0.0)
    for rate in rates:
        before = {name: tensor.clone() for name, tensor in policy.weights()}
        metrics = policy.train_step(grouped_batch(0))
        assert metrics["lr"] == pytest.approx(1e-2 * rate)
        assert any(not torch.equal(tensor, before[name]) for name, tensor in policy.weights()) is (rate > 0)


class Unmeasured(NegativeLogLikelihood):
    """A loss that is no number, whose gradient is."""

    def __call__(self, logprobs, batch, normalizers, entropy=None):
        loss, sums = super().__call__(logprobs, batch, normalizers, entropy)
        return loss, {**sums, "loss": loss.new_tensor(math.nan)}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_loss_that_is_no_number_stops_before_the_update_whatever_its_gradient(kind, qwen3_folder):
    policy = policy_of(kind, qwen3_folder, Unmeasured())
    before = {name: tensor.clone() for name, tensor in policy.weights()}
    with pytest.raises(NonFiniteLossError) as caught:
        policy.train_step(grouped_batch(0))
    assert "loss nan" in caught.value.found and caught.value.where == "optimizer step 0"
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.weights())


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_step_without_a_gradient_is_a_step_all_the_same(kind, qwen3_folder):
    """Matrices decay, and moments that are there go on."""
    policy, batch = policy_of(kind, qwen3_folder, rl_loss()), grouped_batch(0)
    nothing = replace(batch, advantages=torch.zeros_like(batch.advantages))
    before = {name: tensor.clone() for name, tensor in policy.weights()}
    assert policy.train_step(nothing)["grad_norm"] == 0
    for name, tensor in policy.weights():
        torch.testing.assert_close(tensor, before[name] * (1 - 1e-2 * 0.2 * (tensor.dim() > 1)), atol=1e-7, rtol=1e-6)
    policy.train_step(batch)
    before = {name: tensor.clone() for name, tensor in policy.weights()}
    policy.train_step(nothing)
    norms = [tensor - before[name] for name, tensor in policy.weights() if tensor.dim() == 1]
    assert norms and any(moved.any() for moved in norms)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_policy_has_its_weights_back_where_asking_the_reference_fails(kind, qwen3_folder, monkeypatch):
    policy, batch = kind(config_of(kind), qwen3_folder, rl_loss(), reference=True), grouped_batch(0)
    policy.train_step(batch)
    expected = policy.logprobs(batch)

    def fail(_):
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(policy, "logprobs", fail)
        with pytest.raises(ZeroDivisionError):
            policy.reference_logprobs(batch)
    assert torch.equal(policy.logprobs(batch), expected)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_torchs_generator_is_seeded(kind, qwen3_folder):
    kind(config_of(kind), qwen3_folder, rl_loss(), seed=11)
    assert torch.initial_seed() == 11
