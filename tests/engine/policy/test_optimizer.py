"""The precision-aware optimizer: less memory, the same training."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from nemotron_steps.config.schema.policy import OptimizerConfig, PolicyConfig
from nemotron_steps.engine.policy import param_and_grad_buffer as buffers
from nemotron_steps.engine.policy import param_and_grad_buffer as offloaded
from nemotron_steps.engine.policy.megatron import MegatronPolicy
from nemotron_steps.engine.policy.param_and_grad_buffer import join_float32, split_float32
from tests.engine.policy.batches import grouped_batch, policy_config, rl_loss

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


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", [AWARE, NARROW], ids=["remainders", "narrow"])
def test_resuming_equals_an_unbroken_run_bit_for_bit(options, precision, qwen3_folder, tmp_path):
    unbroken, first, second = (policy_of(qwen3_folder, precision, **options) for _ in range(3))
    expected = [unbroken.train_step(grouped_batch(seed)) for seed in range(4)]
    for seed in range(2):
        first.train_step(grouped_batch(seed))
    first.save_checkpoint(str(tmp_path / "step"))
    second.load_checkpoint(str(tmp_path / "step"))
    assert [second.train_step(grouped_batch(seed)) for seed in (2, 3)] == expected[2:]


def test_a_checkpoint_continues_in_the_other_precision(qwen3_folder, tmp_path):
    for name, before, after in (("on", {}, NARROW), ("off", NARROW, {})):
        first, second = policy_of(qwen3_folder, **before), policy_of(qwen3_folder, **after)
        first.train_step(grouped_batch(0))
        first.save_checkpoint(str(tmp_path / name))
        second.load_checkpoint(str(tmp_path / name))
        assert all(torch.equal(master, masters_of(first)[key]) for key, master in masters_of(second).items())
        expected = first.train_step(grouped_batch(1))
        assert second.train_step(grouped_batch(1))["loss"] == pytest.approx(expected["loss"], rel=1e-3, abs=1e-5)


def test_what_would_do_nothing_or_harm_is_refused():
    with pytest.raises(ValidationError, match="needs use_precision_aware_optimizer"):
        OptimizerConfig(exp_avg_dtype="bfloat16")
    with pytest.raises(ValidationError, match=r"adam_beta2 <= 0\.996"):
        OptimizerConfig(**NARROW)
    with pytest.raises(ValidationError, match="is for the megatron policy"):
        PolicyConfig.model_validate({"dtensor_cfg": {"enabled": True}, "megatron_cfg": {"optimizer": AWARE}})


def test_a_second_moment_in_bfloat16_would_not_decay_at_the_default_beta2():
    """Why the config refuses it: rounding to nearest undoes every step of the decay."""
    moment = torch.rand(1000).to(torch.bfloat16)
    assert torch.equal((moment.float() * 0.999).to(torch.bfloat16), moment)
    assert bool(((moment.float() * 0.996).to(torch.bfloat16) < moment)[moment > 0].all())


def test_the_gradient_norm_counts_every_piece_of_a_long_buffer(monkeypatch):
    monkeypatch.setattr(buffers, "_PIECE", 7)
    flat = torch.arange(1.0, 24.0)
    assert buffers.squared_sum(flat) == flat.square().sum()


@pytest.mark.cuda  # a dot product on CPU takes any length
def test_gradients_of_four_billion_parameters_have_a_norm():
    flat = torch.full((2**31 + 64,), 0.5, device="cuda")
    assert buffers.squared_sum(flat).item() == pytest.approx(2**29 + 16, rel=1e-5)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("settings", [{}, NARROW], ids=["plain", "narrow"])
@pytest.mark.parametrize("fraction", [0.4, 1.0])
def test_offloaded_moments_train_the_same_bit_for_bit(qwen3_folder, monkeypatch, precision, settings, fraction):
    monkeypatch.setattr(offloaded, "PIECE", 1000)  # several pieces, both lanes
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


@pytest.mark.cuda
def test_pieces_come_when_the_device_is_done_with_the_memory_that_they_come_into(monkeypatch):
    monkeypatch.setattr(offloaded, "PIECE", 1 << 20)
    device, size = torch.device("cuda"), 3 << 20
    moments = {"exp_avg": offloaded.SplitTensor(size, 1.0, dtype=torch.float32, device=device)}
    moments["exp_avg"].copy_(torch.arange(size, dtype=torch.float32))
    busy = torch.randn(8192, 8192, device=device)
    for _ in range(20):
        busy = busy @ busy / 8192
    before = torch.empty(1 << 20, device=device)
    before.fill_(7.0)  # waits for the products
    del before
    offloaded.through_device(moments, [slice(0, size)], lambda piece, here: here["exp_avg"].add_(1.0))
    assert torch.equal(moments["exp_avg"].on_host, torch.arange(size, dtype=torch.float32) + 1)
