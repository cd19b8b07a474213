"""What an optimizer step does under either policy: its rate, its arithmetic, its precision, when it is not taken."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from nemotron_steps.config.schema.policy import TorchSchedulerConfig
from nemotron_steps.engine.losses.supervised import NegativeLogLikelihood
from nemotron_steps.engine.policy import param_and_grad_buffer
from nemotron_steps.engine.policy.dtensor import DTensorPolicy
from nemotron_steps.engine.policy.megatron import MegatronPolicy
from nemotron_steps.engine.policy.optimizer import TorchLearningRate
from nemotron_steps.engine.policy.param_and_grad_buffer import join_float32, split_float32
from nemotron_steps.errors import NonFiniteLossError
from tests.engine.policy.batches import grouped_batch, policy_config, rl_loss
from tests.engine.policy.ranks import gradients

AWARE = {"use_precision_aware_optimizer": True}
NARROW = {**AWARE, "exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"}


def policy_of(folder, precision="bfloat16", **optimizer):
    settings = {"lr": 3e-3, "weight_decay": 0.1, "adam_beta2": 0.95, **optimizer}
    return MegatronPolicy(policy_config(precision=precision, megatron_cfg={"optimizer": settings}), folder, rl_loss())


def state_bytes(policy) -> float:
    """Of masters and moments, a parameter."""
    optimizer = policy.optimizer
    moments = [moment.on_device for moments in optimizer.moments for moment in moments.values()]
    # Weights that are their own masters cost nothing here.
    masters = [m for m, b in zip(optimizer.masters, policy.buffers, strict=True) if m.data_ptr() != b.values.data_ptr()]
    return sum(t.nbytes for t in [*masters, *moments]) / sum(b.values.numel() for b in policy.buffers)


def masters_of(policy) -> dict[str, torch.Tensor]:
    return policy.optimizer.whole_state()["master"]


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=50))
@settings(max_examples=200, deadline=None)
def test_a_weight_and_its_remainder_give_the_master_back_exactly(numbers):
    master = torch.tensor(numbers, dtype=torch.float32)
    weights, remainders = split_float32(master)
    assert torch.equal(join_float32(weights, remainders).view(torch.int32), master.view(torch.int32))
    nearest = master.to(torch.bfloat16)
    finite = torch.isfinite(nearest)
    # The same distance: only ties are rounded to the other side.
    assert torch.equal((weights.float() - master).abs()[finite], (nearest.float() - master).abs()[finite])


def distance(plain, other, start) -> float:
    """How far apart two policies have come, as a share of how far they have moved."""
    moved = torch.cat([(t.float() - start[name]).flatten() for name, t in plain.weights()])
    found = torch.cat([(t.float() - start[name]).flatten() for name, t in other.weights()])
    return float((found - moved).norm() / moved.norm())


def weights_of(policy) -> dict[str, torch.Tensor]:
    return {name: tensor.float().clone() for name, tensor in policy.weights()}


def test_masters_as_remainders_train_the_same_in_less_room(qwen3_folder):
    plain, aware = policy_of(qwen3_folder), policy_of(qwen3_folder, **AWARE)
    assert (state_bytes(plain), state_bytes(aware)) == (12, 10)
    start = weights_of(plain)
    assert plain.train_step(grouped_batch(0)) == aware.train_step(grouped_batch(0))
    assert all(torch.equal(master, masters_of(plain)[name]) for name, master in masters_of(aware).items())
    # What it computes with is the rounded master, as without.
    weights = aware.buffers[0].unflatten(aware.buffers[0].values)
    assert all(torch.equal(weights[name], split_float32(master)[0]) for name, master in masters_of(aware).items())
    for seed in range(1, 6):
        plain.train_step(grouped_batch(seed))
        aware.train_step(grouped_batch(seed))
    assert distance(plain, aware, start) < 0.1


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_narrow_moments_halve_the_state_and_train_closely(precision, qwen3_folder):
    plain, narrow = (policy_of(qwen3_folder, precision, **options) for options in ({}, NARROW))
    assert state_bytes(narrow) == state_bytes(plain) / 2
    start = weights_of(plain)
    for seed in range(12):
        plain.train_step(grouped_batch(seed % 2))
        narrow.train_step(grouped_batch(seed % 2))
    assert distance(plain, narrow, start) < 0.1
    assert narrow.optimizer.moments[0]["exp_avg_sq"].dtype is torch.bfloat16


def test_a_checkpoint_continues_in_the_other_precision(qwen3_folder, tmp_path):
    for name, before, after in (("on", {}, NARROW), ("off", NARROW, {})):
        first, second = policy_of(qwen3_folder, **before), policy_of(qwen3_folder, **after)
        first.train_step(grouped_batch(0))
        first.save_checkpoint(str(tmp_path / name))
        second.load_checkpoint(str(tmp_path / name))
        assert all(torch.equal(master, masters_of(first)[key]) for key, master in masters_of(second).items())
        expected = first.train_step(grouped_batch(1))
        assert second.train_step(grouped_batch(1))["loss"] == pytest.approx(expected["loss"], rel=1e-3, abs=1e-5)


def test_the_gradient_norm_counts_every_piece_of_a_long_buffer(monkeypatch):
    monkeypatch.setattr(param_and_grad_buffer, "_PIECE", 7)
    flat = torch.arange(1.0, 24.0)
    assert param_and_grad_buffer.squared_sum(flat) == flat.square().sum()


@pytest.mark.cuda  # a dot product on CPU takes any length
def test_gradients_of_four_billion_parameters_have_a_norm():
    flat = torch.full((2**31 + 64,), 0.5, device="cuda")
    assert param_and_grad_buffer.squared_sum(flat).item() == pytest.approx(2**29 + 16, rel=1e-5)


@pytest.mark.parametrize(
    ("precision", "settings", "fraction"),
    [("float32", {}, 0.4), ("bfloat16", {}, 1.0), ("bfloat16", NARROW, 0.4)],
    ids=["float32", "bfloat16", "narrow"],
)
def test_offloaded_moments_train_the_same_bit_for_bit(qwen3_folder, monkeypatch, precision, settings, fraction):
    monkeypatch.setattr(param_and_grad_buffer, "PIECE", 1000)  # several pieces
    plain = policy_of(qwen3_folder, precision, **settings)
    split = policy_of(
        qwen3_folder, precision, **settings, optimizer_cpu_offload=True, optimizer_offload_fraction=fraction
    )
    (moments,) = split.optimizer.moments
    size = moments["exp_avg"].on_device.numel() + moments["exp_avg"].on_host.numel()
    assert moments["exp_avg"].on_host.numel() == pytest.approx(fraction * size, abs=128)
    for seed in range(3):
        assert plain.train_step(grouped_batch(seed)) == split.train_step(grouped_batch(seed))
    for name, state in plain.optimizer.whole_state().items():
        other = split.optimizer.whole_state()[name]
        assert all(torch.equal(tensor, other[key]) for key, tensor in state.items())
    assert any(moment.on_host.any() for moment in moments.values())


def test_offloaded_moments_go_through_a_checkpoint_into_any_split(qwen3_folder, tmp_path):
    split = policy_of(qwen3_folder, optimizer_cpu_offload=True, optimizer_offload_fraction=0.5)
    split.train_step(grouped_batch(0))
    split.save_checkpoint(str(tmp_path / "saved"))
    plain = policy_of(qwen3_folder)
    plain.load_checkpoint(str(tmp_path / "saved"))
    assert split.train_step(grouped_batch(1)) == plain.train_step(grouped_batch(1))
    for name, tensor in masters_of(plain).items():
        assert torch.equal(tensor, masters_of(split)[name])


KINDS = {
    MegatronPolicy: {"adam_beta1": 0.7, "adam_beta2": 0.8, "adam_eps": 1e-2},
    DTensorPolicy: {"betas": [0.7, 0.8], "eps": 1e-2},
}
"""Policy → the optimizer's settings that both are tried with, as its config calls them."""


def step_policy(kind, folder, loss=None, *, scheduler=None, total_steps=None, **optimizer):
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
    policy = step_policy(kind, qwen3_folder, **KINDS[kind])
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
    policy = step_policy(kind, qwen3_folder, scheduler=scheduler, total_steps=total_steps, weight_decay=0.0)
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
    policy = step_policy(kind, qwen3_folder, Unmeasured())
    before = {name: tensor.clone() for name, tensor in policy.weights()}
    with pytest.raises(NonFiniteLossError) as caught:
        policy.train_step(grouped_batch(0))
    assert "loss nan" in caught.value.found and caught.value.where == "optimizer step 0"
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.weights())


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_step_without_a_gradient_is_a_step_all_the_same(kind, qwen3_folder):
    """Matrices decay, and moments that are there go on."""
    policy, batch = step_policy(kind, qwen3_folder, rl_loss()), grouped_batch(0)
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


LINEAR_LR = {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.1, "total_iters": 4}}
COSINE = {"name": "torch.optim.lr_scheduler.CosineAnnealingLR", "kwargs": {"T_max": 4, "eta_min": 2.0}}


def entries(*given):
    return [TorchSchedulerConfig.model_validate(entry) for entry in given]


def test_schedulers_follow_each_other_at_their_milestones():
    rate = TorchLearningRate(10.0, entries(LINEAR_LR, COSINE, {"milestones": [4]}))
    found = [rate.at(step) for step in range(9)]
    assert found[:5] == pytest.approx([1.0, 3.25, 5.5, 7.75, 10.0])
    assert found[6] == pytest.approx(6.0) and found[8] == pytest.approx(2.0)


def test_a_resumed_run_has_the_rate_of_its_step():
    rate = TorchLearningRate(10.0, entries(LINEAR_LR))
    assert (rate.at(3), rate.at(1), rate.at(3)) == pytest.approx((7.75, 3.25, 7.75))


@pytest.mark.parametrize(
    "entry",
    [
        {},
        {**LINEAR_LR, "milestones": [4]},
        {"kwargs": {"factor": 1.0}, "milestones": [4]},
        {**LINEAR_LR, "kwargs": {"T_max": 4}},
        {"name": "torch.optim.lr_scheduler.StepLR"},
    ],
)
def test_what_torch_would_not_take_is_refused(entry):
    with pytest.raises(ValidationError):
        TorchSchedulerConfig.model_validate(entry)
