"""What training a hybrid must not depend on, and what it must keep."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from nemotron_steps.engine.policy.megatron import MegatronPolicy
from nemotron_steps.engine.types import TrainBatch
from nemotron_steps.models.huggingface import load_hf_weights
from nemotron_steps.models.megatron_checkpoint import convert_megatron_to_hf
from tests.conditioning import assert_conditioned
from tests.engine.policy.batches import SMOOTH, grouped_batch, hf_token_logprobs, policy_config, rl_loss

EXACT = ("A_log", "mixer.D", "dt_bias", "e_score_correction_bias")
BALANCED = {"moe_router_bias_update_rate": 1e-3, "optimizer": {**SMOOTH, "lr": 1e-3}}


def policy_of(folder, **changes):
    return MegatronPolicy(policy_config(**changes), folder, rl_loss())


@pytest.mark.parametrize("name", ["dense", "latent"])
def test_a_packed_row_knows_nothing_of_its_neighbours(name, hybrid_folders, batch):
    """Neither through the scan's state nor through the convolution's window."""
    policy = policy_of(hybrid_folders(name))
    before = policy.logprobs(batch)
    other = grouped_batch(seed=7).input_ids
    for changed in (range(7, 8), range(8, 12)):  # a loner, and a group with its prompt
        ids = batch.input_ids.clone()
        ids[changed] = other[changed]
        after = policy.logprobs(TrainBatch(**{**vars(batch), "input_ids": ids}))
        rest = [row for row in range(len(batch)) if row not in changed]
        torch.testing.assert_close(after[rest], before[rest], atol=2e-6, rtol=0)
        assert float((after[changed] - before[changed]).abs().max()) > 0.1


def test_masked_tokens_and_padding_change_nothing(hybrid_folders, batch):
    policy = policy_of(hybrid_folders("latent"))
    before = policy.logprobs(batch)
    dirty = TrainBatch(**{**vars(batch), "input_ids": batch.input_ids.clone()})
    for row in range(len(batch)):
        dirty.input_ids[row, int(batch.lengths[row]) :] = 5
    assert torch.equal(policy.logprobs(dirty), before)


@pytest.mark.parametrize(
    "change",
    [
        {"train_micro_batch_size": 1},
        {"train_micro_batch_size": 5},
        {"sequence_packing": {"enabled": True, "train_mb_tokens": 150, "sequence_length_round": 1}},
        {"make_sequence_length_divisible_by": 96},
        {"train_micro_batch_size": 5, "megatron_cfg": {**BALANCED, "activation_checkpointing": True}},
    ],
    ids=str,
)
def test_gradients_and_biases_do_not_depend_on_how_the_batch_is_cut(change, hybrid_folders):
    def trained(changes, folder, *batches):
        policy = policy_of(folder, **{"megatron_cfg": BALANCED, **changes})
        metrics = [policy.train_step(batch) for batch in batches]
        return {"metrics": metrics, "biases": [router.expert_bias.clone() for router in policy.model.routers()]}

    given = hybrid_folders("latent"), grouped_batch(0), grouped_batch(1)
    assert_conditioned(trained(change, *given), partial(trained, {}), *given)


def test_matrices_decay_and_norms_biases_and_the_recurrence_do_not(hybrid_folders):
    policy = policy_of(hybrid_folders("latent"))
    decayed, kept = set(), set()
    for buffer in policy.buffers:
        for slot in buffer.slots:
            (segment,) = (each for each in buffer.segments if each.start <= slot.start < each.end)
            name = slot.parameter.name
            short = name.split(".", 3)[-1] if name.startswith("decoder.layers.") else name
            (decayed if segment.kind.decayed else kept).add(short)
    assert kept == {
        *("norm.weight", "input_layernorm.weight", "pre_mlp_layernorm.weight", "mixer.norm.weight"),
        *("mixer.A_log", "mixer.D", "mixer.dt_bias", "mixer.conv1d.bias", "decoder.final_norm.weight"),
    }
    assert {"mixer.in_proj.weight", "mlp.experts.linear_fc1.weight", "mlp.router.weight"} <= decayed


@pytest.mark.parametrize("frozen", [False, True])
def test_in_bfloat16_what_must_be_exact_is_float32_and_trained(frozen, hybrid_folders, batch, tmp_path):
    """The recurrence's parameters, the router's bias and a frozen router, in memory, exports and checkpoints."""
    changes = {"precision": "bfloat16", "megatron_cfg": {**BALANCED, "freeze_moe_router": frozen}}
    policy = policy_of(hybrid_folders("latent"), **changes)
    before = {name: tensor.clone() for name, tensor in policy.weights()}
    exact = {name for name in before if name.endswith(EXACT) or (frozen and name.endswith("gate.weight"))}
    assert {name for name, tensor in before.items() if tensor.dtype is torch.float32} == exact
    stored = load_hf_weights(hybrid_folders("latent"))
    assert all(torch.equal(before[name], stored[name]) for name in exact)

    policy.train_step(batch)
    after = {name: tensor.clone() for name, tensor in policy.weights()}
    still = {name for name in after if torch.equal(after[name], before[name])}
    assert not any(name.endswith(EXACT) for name in still)
    assert {name for name in still if name.endswith("gate.weight")} == {n for n in exact if n.endswith("gate.weight")}

    policy.save_checkpoint(str(tmp_path / "step"))
    resumed = policy_of(hybrid_folders("latent"), **changes)
    resumed.load_checkpoint(str(tmp_path / "step"))
    assert all(torch.equal(after[name], tensor) for name, tensor in resumed.weights())
    assert resumed.train_step(grouped_batch(1)) == policy.train_step(grouped_batch(1))

    policy.save_model(tmp_path / "model")
    convert_megatron_to_hf(tmp_path / "model", tmp_path / "hf")
    exported, live = load_hf_weights(tmp_path / "hf"), dict(policy.weights())
    assert all(
        exported[name].dtype is tensor.dtype and torch.equal(exported[name], tensor) for name, tensor in live.items()
    )


def test_a_narrow_optimizer_keeps_what_is_float32_as_it_keeps_the_rest(hybrid_folders, batch, tmp_path):
    """Remainders in place of master weights, for the bfloat16 parameters alone; a resumed run goes on like it."""
    narrow = {"lr": 1e-3, "use_precision_aware_optimizer": True, "exp_avg_dtype": "bfloat16"}
    changes = {"precision": "bfloat16", "megatron_cfg": {"optimizer": {**narrow, "use_distributed_optimizer": True}}}
    policy = policy_of(hybrid_folders("latent"), **changes)
    assert {buffer.values.dtype for buffer in policy.buffers} == {torch.float32, torch.bfloat16}
    policy.train_step(batch)
    policy.save_checkpoint(str(tmp_path / "step"))
    resumed = policy_of(hybrid_folders("latent"), **changes)
    resumed.load_checkpoint(str(tmp_path / "step"))
    assert resumed.train_step(grouped_batch(1)) == policy.train_step(grouped_batch(1))
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(policy.weights(), resumed.weights(), strict=True))


def test_the_published_balancing_rate_trains_the_models_own_bias(hybrid_folders, batch):
    name = "backbone.layers.1.mixer.gate.e_score_correction_bias"
    start = load_hf_weights(hybrid_folders("latent"))[name]
    config = policy_config(megatron_cfg={**BALANCED, "freeze_moe_router": True})
    policy = MegatronPolicy(config, hybrid_folders("latent"), rl_loss(), reference=True)
    reference = policy.reference_logprobs(batch)
    for _ in range(3):
        policy.train_step(batch)
    moved = (dict(policy.weights())[name] - start) / 1e-3
    assert torch.allclose(moved, moved.round(), atol=1e-2) and 1 <= float(moved.abs().max()) <= 3.01
    assert torch.equal(policy.reference_logprobs(batch), reference)  # with the biases that it started with
    untouched = policy_of(hybrid_folders("latent"))  # rate 0: the bias is there, and stays
    untouched.train_step(batch)
    assert torch.equal(dict(untouched.weights())[name], start)


def test_multi_token_prediction_survives_training_bit_for_bit(hybrid_folders, batch, tmp_path):
    stored = load_hf_weights(hybrid_folders("mtp"))
    mtp = {name: tensor for name, tensor in stored.items() if name.startswith("mtp.")}
    assert mtp
    policy = policy_of(hybrid_folders("mtp"), precision="bfloat16")
    policy.train_step(batch)
    assert not any(name.startswith("mtp.") for name, _ in policy.weights())  # no generator loads them
    policy.save_hf(tmp_path / "hf")
    policy.save_model(tmp_path / "model")
    convert_megatron_to_hf(tmp_path / "model", tmp_path / "converted")
    policy.save_checkpoint(str(tmp_path / "step"))
    convert_megatron_to_hf(tmp_path / "step", tmp_path / "of the step")
    for folder in ("hf", "converted", "of the step"):
        found = load_hf_weights(tmp_path / folder)
        assert set(found) == set(stored)
        assert all(found[name].dtype is mtp[name].dtype and torch.equal(found[name], mtp[name]) for name in mtp), folder
    again = MegatronPolicy(policy_config(precision="bfloat16"), tmp_path / "model", rl_loss())
    assert torch.equal(again.logprobs(batch), policy.logprobs(batch))


def test_an_export_gives_the_same_logprobs_in_transformers(hybrid_folders, batch, tmp_path):
    from transformers import AutoModelForCausalLM

    policy = policy_of(hybrid_folders("latent"), megatron_cfg=BALANCED)
    policy.train_step(batch)
    policy.save_hf(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(policy.logprobs(batch), hf_token_logprobs(model, batch).detach(), atol=1e-5, rtol=0)
