"""Adapters beside frozen weights: what they start as, learn, cost, and leave behind."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from nemotron_steps.engine.policy.lora import LowRank, attach_adapters, without_adapters
from nemotron_steps.engine.policy.megatron import MegatronPolicy
from nemotron_steps.errors import ConfigError
from nemotron_steps.models.adapters import adapter_pairs, merge_adapter
from nemotron_steps.models.huggingface import load_hf_weights
from nemotron_steps.models.megatron_checkpoint import convert_hf_to_megatron
from tests.engine.policy.batches import grouped_batch, hf_token_logprobs, policy_config, rl_loss
from tests.models import hybrid_twins
from tests.models.checkpoints import write_checkpoint

OPTIMIZER = {"lr": 1e-2, "weight_decay": 0.1}


def lora_config(optimizer=None, precision="float32", **peft):
    settings = {"enabled": True, "dim": 4, "alpha": 8, **peft}
    return policy_config(
        precision=precision, megatron_cfg={"optimizer": {**OPTIMIZER, **(optimizer or {})}, "peft": settings}
    )


def test_adapters_start_as_nothing_bit_for_bit(qwen3_folder, batch):
    policy = MegatronPolicy(lora_config(), qwen3_folder, rl_loss(), reference=True)
    assert torch.equal(policy.logprobs(batch), policy.reference_logprobs(batch))
    plain = MegatronPolicy(policy_config(), qwen3_folder, rl_loss())
    torch.testing.assert_close(policy.logprobs(batch), plain.logprobs(batch), atol=1e-5, rtol=0)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(policy.weights(), plain.weights(), strict=True))


def test_adapters_alone_are_trained_and_the_reference_is_the_frozen_model(qwen3_folder, batch):
    policy = MegatronPolicy(lora_config(), qwen3_folder, rl_loss(), reference=True)
    before, frozen = policy.logprobs(batch), {n: t.clone() for n, t in policy.shards.frozen_tensors()}
    for _ in range(3):
        policy.train_step(batch)
    assert float((policy.logprobs(batch) - before).abs().max()) > 0.01
    assert torch.equal(policy.reference_logprobs(batch), before)
    assert all(torch.equal(t, frozen[n]) for n, t in policy.shards.frozen_tensors())
    adapters = sum(p.numel() for m in policy.model.modules() if isinstance(m, LowRank) for p in m.parameters())
    assert sum(slot.end - slot.start for buffer in policy.buffers for slot in buffer.slots) == adapters
    assert {slot.parameter.of_adapter for buffer in policy.buffers for slot in buffer.slots} == {True}


@pytest.mark.parametrize("name", ["qwen3", "qwen2_tied", "qwen3_moe", "dense", "mixture"])
def test_a_merged_checkpoint_computes_what_the_adapters_do(name, tmp_path, batch):
    from transformers import AutoModelForCausalLM

    if name in hybrid_twins.TWINS:
        hybrid_twins.write_hybrid(name, tmp_path / "base", vocab_size=201)
    else:
        write_checkpoint(name, tmp_path / "base", initializer_range=0.1)
    targets = {"qwen3_moe": ["linear_qkv", "linear_proj"], "mixture": ["in_proj", "out_proj"]}.get(name, [])
    config = lora_config(target_modules=targets)
    policy = MegatronPolicy(config, tmp_path / "base", rl_loss())
    for _ in range(2):
        policy.train_step(batch)
    policy.save_adapter(tmp_path / "adapter", str(tmp_path / "base"), "")
    merge_adapter(tmp_path / "adapter", None, tmp_path / "merged")
    live = {n: t.clone() for n, t in policy.weights()}
    merged = load_hf_weights(tmp_path / "merged")
    assert merged.keys() == live.keys()
    assert max(float((merged[n] - live[n]).abs().max()) for n in live) < 1e-6
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    expected = policy.logprobs(batch)
    torch.testing.assert_close(hf_token_logprobs(model, batch).detach(), expected, atol=2e-5, rtol=0)
    policy.save_model(tmp_path / "megatron")
    whole = MegatronPolicy(policy_config(), tmp_path / "megatron", rl_loss())
    torch.testing.assert_close(whole.logprobs(batch), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_resuming_adapters_equals_an_unbroken_run_bit_for_bit(precision, qwen3_folder, tmp_path):
    config = lora_config(precision=precision, dropout=0.1)
    batches = [grouped_batch(seed=number) for number in range(4)]
    unbroken = MegatronPolicy(config, qwen3_folder, rl_loss())
    expected = [unbroken.train_step(batch) for batch in batches]
    first = MegatronPolicy(config, qwen3_folder, rl_loss())
    for each in batches[:2]:
        first.train_step(each)
    first.save_checkpoint(str(tmp_path / "step"))
    second = MegatronPolicy(config, qwen3_folder, rl_loss())
    second.load_checkpoint(str(tmp_path / "step"))
    assert [second.train_step(batch) for batch in batches[2:]] == expected[2:]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(unbroken.weights(), second.weights(), strict=True))
    stored = sum(path.stat().st_size for path in (tmp_path / "step" / "weights").iterdir())
    first.save_model(tmp_path / "model")
    whole = sum(path.stat().st_size for path in (tmp_path / "model" / "weights").iterdir())
    assert stored < 1.5 * whole  # adapters, moments and masters of a 60 k model, not three copies of it


def test_dropout_is_of_training_alone(qwen3_folder, batch):
    policy = MegatronPolicy(lora_config(dropout=0.5, dropout_position="post"), qwen3_folder, rl_loss())
    policy.train_step(batch)
    assert torch.equal(policy.logprobs(batch), policy.logprobs(batch))
    losses = set()
    for _ in range(2):
        policy.optimizer.zero_gradients()
        losses.add(policy._accumulate(batch, _normalizers(batch))["loss"])
    assert len(losses) == 2


@pytest.mark.parametrize("position", ["pre", "post"])
def test_dropout_is_of_an_adapters_input_or_output(position, qwen3_folder):
    config = lora_config(dropout=0.5, dropout_position=position, target_modules=["linear_proj"])
    policy = MegatronPolicy(config, qwen3_folder, rl_loss())
    adapters = [module for module in policy.model.modules() if isinstance(module, LowRank)]
    adapter = adapters[1]
    adapter.linear_out.weight.data.fill_(1.0)
    states, nothing = torch.eye(64)[:, None], torch.zeros(64, 1, 64)
    with torch.no_grad():
        added = adapter.added_to(nothing, states)  # without a gradient, nothing is dropped
    torch.testing.assert_close(added, 2.0 * adapter.linear_out(adapter.linear_in(states)).detach())
    ratio = adapter.added_to(nothing, states) / added
    kept = ratio > 1
    torch.testing.assert_close(ratio, 2.0 * kept, atol=1e-4, rtol=0)
    whole = (kept.all(2) | ~kept.any(2)).all()  # an input has one number that is not 0
    assert bool(whole) is (position == "pre") and 0.2 < kept.float().mean() < 0.8
    with pytest.raises(ZeroDivisionError), without_adapters(policy.model):
        assert not any(each.added_to(nothing, states).any() for each in adapters)
        raise ZeroDivisionError
    assert all(each.active for each in adapters)


def test_every_a_is_drawn_from_the_seed_and_its_own_name(qwen3_folder):
    def drawn(seed=0, **peft):
        policy = MegatronPolicy(lora_config(target_modules=["linear_proj"], **peft), qwen3_folder, rl_loss(), seed=seed)
        return [m.linear_in.weight.detach().clone() for m in policy.model.modules() if isinstance(m, LowRank)]

    first = drawn(dim=16)
    assert all(torch.equal(a, b) for a, b in zip(first, drawn(dim=16), strict=True))
    for others in (drawn(1, dim=16), first[1:]):
        assert not any(torch.equal(a, b) for a, b in zip(first, others, strict=False))
    assert float(torch.cat(first).abs().max()) == pytest.approx(64**-0.5, rel=0.01)  # Kaiming's bound
    xavier = torch.cat(drawn(dim=16, lora_A_init_method="xavier"))
    assert float(xavier.std()) == pytest.approx((2 / (64 + 16)) ** 0.5, rel=0.05)


def test_a_stage_without_an_adapter_is_refused(qwen3_folder):
    policy = MegatronPolicy(policy_config(), qwen3_folder, rl_loss())
    peft = lora_config().megatron_cfg.peft
    pairs = adapter_pairs(replace(policy.architecture, num_layers=4), peft, key="peft")
    of_another_stage = [pair for pair in pairs if pair.base.layer == 3]
    with pytest.raises(ConfigError, match="nothing to train"):
        attach_adapters(policy.model, of_another_stage, peft, seed=0)


def _normalizers(batch):
    from nemotron_steps.engine.losses.loss import count_normalizers

    return count_normalizers(batch)


def test_layers_are_chosen_by_name_and_pattern(qwen3_folder, tmp_path):
    def adapted(**peft):
        policy = MegatronPolicy(lora_config(**peft), qwen3_folder, rl_loss())
        policy.save_adapter(tmp_path, str(qwen3_folder), "")
        return {name for name, module in policy.model.named_modules() if isinstance(module, LowRank)}, json.loads(
            (tmp_path / "adapter_config.json").read_text()
        )["target_modules"]

    found, peft = adapted(target_modules=["linear_qkv"])
    assert len(found) == 3 and peft == ["k_proj", "q_proj", "v_proj"]
    found, peft = adapted(target_modules=["*.layers.1.*.linear_fc2", "linear_proj"])
    assert "decoder.layers.1.mlp.linear_fc2.adapter" in found and len(found) == 4
    assert peft == ["model.layers.1.mlp.down_proj", "o_proj"]
    found, _ = adapted(exclude_modules=["linear_qkv", "*.mlp.*"])
    assert found == {f"decoder.layers.{n}.self_attention.linear_proj.adapter" for n in range(3)}
    with pytest.raises(ConfigError, match="no linear layer 'q_proj'"):
        adapted(target_modules=["q_proj"])


@pytest.mark.parametrize(("name", "whole"), [("qwen3", True), ("qwen2_tied", False)])
def test_modules_whose_biases_have_no_adapter_are_not_whole(name, whole, tmp_path):
    write_checkpoint(name, tmp_path)
    policy = MegatronPolicy(lora_config(target_modules=["linear_qkv"]), tmp_path, rl_loss())
    assert policy.weights().whole_modules is whole


def test_experts_have_no_adapters_and_the_hint_says_what_may(tmp_path):
    write_checkpoint("qwen3_moe", tmp_path)
    with pytest.raises(ConfigError, match="cannot have an adapter") as refused:
        MegatronPolicy(lora_config(), tmp_path, rl_loss())
    assert refused.value.hints == ("policy.megatron_cfg.peft.target_modules=[linear_qkv,linear_proj]",)


def test_adapters_of_a_megatron_base_merge_alike(qwen3_folder, tmp_path, batch):
    convert_hf_to_megatron(qwen3_folder, tmp_path / "base")
    policies = [MegatronPolicy(lora_config(), folder, rl_loss()) for folder in (qwen3_folder, tmp_path / "base")]
    for number, policy in enumerate(policies):
        policy.train_step(batch)
        policy.save_adapter(tmp_path / f"adapter{number}", str(tmp_path / "base"), "")
        merge_adapter(tmp_path / f"adapter{number}", None, tmp_path / f"merged{number}")
    one, other = (load_hf_weights(tmp_path / f"merged{number}") for number in (0, 1))
    assert all(torch.equal(one[name], other[name]) for name in one)
