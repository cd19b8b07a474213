"""A hybrid on FSDP2, through transformers, against the megatron policy."""

from __future__ import annotations

import torch

from nemotron_steps.engine.policy.dtensor import DTensorPolicy
from nemotron_steps.engine.policy.megatron import MegatronPolicy
from tests.conditioning import assert_conditioned
from tests.engine.policy.batches import SMOOTH, grouped_batch, policy_config, rl_loss
from tests.models.hybrid_twins import write_hybrid


def test_the_dtensor_policy_trains_hybrids_as_megatron_does(batch, tmp_path):
    """Also where transformers would bound time steps that no generator bounds."""
    write_hybrid("mtp", tmp_path / "hub", initializer_range=0.1, time_step_min=0.5)
    config = policy_config(max_grad_norm=1e9, megatron_cfg={"optimizer": SMOOTH})

    def trained(policy, *batches):
        return {"before": policy.logprobs(batch), "metrics": [policy.train_step(each) for each in batches]}

    def theirs(folder, *batches):
        return trained(MegatronPolicy(config, folder, rl_loss()), *batches)

    batches = grouped_batch(0), grouped_batch(1)
    fsdp = policy_config(max_grad_norm=1e9, megatron_cfg={"optimizer": SMOOTH}, dtensor_cfg={"enabled": True})
    ours = DTensorPolicy(fsdp, tmp_path / "hub", rl_loss())
    assert_conditioned(trained(ours, *batches), theirs, tmp_path / "hub", *batches)
    weights = {name: tensor.clone() for name, tensor in ours.weights()}
    ours.save_model(tmp_path / "megatron")
    opened = MegatronPolicy(config, tmp_path / "megatron", rl_loss())
    assert set(weights) == {name for name, tensor in opened.weights() if torch.equal(weights[name], tensor)}
    assert_conditioned(
        ours.logprobs(batch), lambda f: MegatronPolicy(config, f, rl_loss()).logprobs(batch), tmp_path / "megatron"
    )
    assert (tmp_path / "megatron" / "hf" / "carried.safetensors").is_file()


def test_what_is_float32_in_every_precision_is_so_in_a_bfloat16_forward_pass(batch, tmp_path):
    """The rest of a layer is bfloat16 in it."""
    write_hybrid("latent", tmp_path / "hub", initializer_range=0.1)
    config = policy_config(dtensor_cfg={"enabled": True}, precision="bfloat16")
    policy = DTensorPolicy(config, tmp_path / "hub", rl_loss())
    seen: dict[str, set[torch.dtype]] = {}

    def note(module, *_):
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            seen.setdefault(name, set()).add(tensor.dtype)

    for layer in policy.model.layers():
        layer.mixer.register_forward_pre_hook(note)
    policy.logprobs(batch)
    exact = {name for name, dtypes in seen.items() if dtypes == {torch.float32}}
    assert exact == {"A_log", "D", "dt_bias", "gate.e_score_correction_bias"}
    assert all(seen[name] == {torch.bfloat16} for name in set(seen) - exact)


def test_steps_smaller_than_bfloat16_tells_apart_reach_the_generator(batch, tmp_path):
    write_hybrid("latent", tmp_path / "hub", initializer_range=0.1)
    config = policy_config(
        dtensor_cfg={"enabled": True}, precision="bfloat16", megatron_cfg={"optimizer": {"lr": 1e-5}}
    )
    policy = DTensorPolicy(config, tmp_path / "hub", rl_loss())
    before = {name: tensor.clone() for name, tensor in policy.weights()}
    policy.train_step(batch)
    moved = {name for name, tensor in policy.weights() if not torch.equal(tensor, before[name])}
    for name, tensor in policy.weights():
        if name.endswith(("A_log", "mixer.D", "dt_bias")):
            assert tensor.dtype == torch.float32 and name in moved
            assert float((tensor - before[name]).abs().max()) < 2e-5
