"""Adapters beside frozen weights, of either policy: what they start as, learn, cost, and leave behind."""

import json
from dataclasses import replace

import pytest
import torch

from nemotron_steps.config.schema.policy import LoraConfig
from nemotron_steps.engine.policy.dtensor import DTensorPolicy
from nemotron_steps.engine.policy.lora import HfAdapters, LowRank, attach_adapters, without_adapters
from nemotron_steps.engine.policy.megatron import MegatronPolicy
from nemotron_steps.errors import ConfigError
from nemotron_steps.models.adapters import adapter_pairs, merge_adapter
from nemotron_steps.models.huggingface import load_hf_weights
from tests.engine.policy.batches import grouped_batch, hf_token_logprobs, lora_config, policy_config, rl_loss
from tests.engine.weight_sync.test_adapted import generator_of, held
from tests.models import hybrid_twins
from tests.models.checkpoints import write_checkpoint


def test_adapters_alone_are_trained_and_the_reference_is_the_frozen_model(qwen3_folder, batch):
    policy = MegatronPolicy(lora_config(), qwen3_folder, rl_loss(), reference=True)
    before, shards = policy.logprobs(batch), policy.shards
    frozen = {pair.base: shards._whole(pair.base, adapted=False).clone() for pair in shards.adapters}
    for _ in range(3):
        policy.train_step(batch)
    assert float((policy.logprobs(batch) - before).abs().max()) > 0.01
    assert torch.equal(policy.reference_logprobs(batch), before)
    assert all(torch.equal(shards._whole(base, adapted=False), tensor) for base, tensor in frozen.items())
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


def test_experts_have_no_adapters_and_the_hint_says_what_may(tmp_path):
    write_checkpoint("qwen3_moe", tmp_path)
    with pytest.raises(ConfigError, match="cannot have an adapter") as refused:
        MegatronPolicy(lora_config(), tmp_path, rl_loss())
    assert refused.value.hints == ("policy.megatron_cfg.peft.target_modules=[linear_qkv,linear_proj]",)


def hf_lora_config(precision="float32", **lora):
    settings = {"enabled": True, "lora_cfg": {"enabled": True, "dim": 4, "alpha": 8, **lora}}
    return policy_config(precision=precision, dtensor_cfg=settings, megatron_cfg={"optimizer": {"lr": 1e-2}})


def test_they_start_as_nothing_and_the_reference_is_the_frozen_model(qwen3_folder, batch):
    policy = DTensorPolicy(hf_lora_config(), qwen3_folder, rl_loss(), reference=True)
    before = policy.logprobs(batch)
    assert torch.equal(policy.reference_logprobs(batch), before)
    for _ in range(2):
        policy.train_step(batch)
    assert float((policy.logprobs(batch) - before).abs().max()) > 0.01
    assert torch.equal(policy.reference_logprobs(batch), before)
    trained = {name for name, p in policy.model.hf.named_parameters() if p.requires_grad}
    assert trained and all(".lora_" in name for name in trained)


@pytest.mark.parametrize("name", ["qwen3", "qwen2_tied"])
def test_a_merged_checkpoint_computes_what_they_do_and_generators_follow(name, tmp_path, batch):
    from transformers import AutoModelForCausalLM

    write_checkpoint(name, tmp_path / "base", initializer_range=0.1)
    policy = DTensorPolicy(hf_lora_config(), tmp_path / "base", rl_loss())
    generator = generator_of(tmp_path / "base", policy.weights())
    for _ in range(2):
        policy.train_step(batch)
    generator.update_weights(policy.weights(), 1)
    fresh = generator_of(tmp_path / "base", list(policy.weights()))
    assert all(torch.equal(a, b) for a, b in zip(held(generator), held(fresh), strict=True))
    policy.save_adapter(tmp_path / "adapter", str(tmp_path / "base"), "")
    merge_adapter(tmp_path / "adapter", None, tmp_path / "merged")
    merged, live = load_hf_weights(tmp_path / "merged"), dict(policy.weights())
    assert max(float((merged[each] - live[each]).abs().max()) for each in merged) < 1e-6
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    torch.testing.assert_close(hf_token_logprobs(model, batch).detach(), policy.logprobs(batch), atol=2e-5, rtol=0)


def test_resuming_on_dtensor_equals_an_unbroken_run_bit_for_bit(qwen3_folder, tmp_path):
    config = hf_lora_config("bfloat16", dropout=0.1)
    batches = [grouped_batch(seed=number) for number in range(3)]
    unbroken = DTensorPolicy(config, qwen3_folder, rl_loss())
    expected = [unbroken.train_step(batch) for batch in batches]
    first = DTensorPolicy(config, qwen3_folder, rl_loss())
    first.train_step(batches[0])
    first.save_checkpoint(str(tmp_path / "step"))
    second = DTensorPolicy(config, qwen3_folder, rl_loss())
    second.load_checkpoint(str(tmp_path / "step"))
    assert [second.train_step(batch) for batch in batches[1:]] == expected[1:]


def test_linears_are_chosen_by_name_and_a_wrong_one_is_named(qwen3_folder):
    policy = DTensorPolicy(hf_lora_config(match_all_linear=False, target_modules=["q_proj"]), qwen3_folder, rl_loss())
    assert policy._adapters.names == {f"model.layers.{n}.self_attn.q_proj.weight" for n in range(3)}
    with pytest.raises(ConfigError, match="no linear layer 'linear_qkv'"):
        DTensorPolicy(hf_lora_config(match_all_linear=False, target_modules=["linear_qkv"]), qwen3_folder, rl_loss())


class OneLinear(torch.nn.Module):
    """What adapters need of a transformers model."""

    def __init__(self, width):
        super().__init__()
        self.model = torch.nn.Module()
        self.model.q_proj = torch.nn.Linear(width, 6, bias=False)


def adapted_linear(width=16, seed=0, **lora):
    hf = OneLinear(width)
    adapters = HfAdapters(hf, LoraConfig(enabled=True, dim=4, alpha=12, **lora), seed=seed)
    torch.nn.init.ones_(hf.model.q_proj.lora_B.weight)
    return hf.model.q_proj, adapters


@pytest.mark.parametrize("position", ["pre", "post"])
def test_dropout_on_dtensor_is_of_an_adapters_input_or_output_and_of_training_alone(position):
    torch.manual_seed(0)
    linear, adapters = adapted_linear(dropout=0.5, dropout_position=position)
    states = torch.eye(16)  # so that an input is dropped whole, and an output number by number
    plain = states @ linear.weight.T
    added = 3.0 * states @ linear.lora_A.weight.T @ linear.lora_B.weight.T
    with torch.no_grad():
        torch.testing.assert_close(linear(states), plain + added)
    ratio = (linear(states) - plain) / added
    kept = ratio > 1
    torch.testing.assert_close(ratio, 2.0 * kept, atol=1e-4, rtol=0)
    whole = (kept.all(1) | ~kept.any(1)).all()
    assert bool(whole) is (position == "pre") and 0.2 < kept.float().mean() < 0.8
    with pytest.raises(ZeroDivisionError), adapters.off():
        assert torch.equal(linear(states), plain)
        raise ZeroDivisionError
    with torch.no_grad():
        torch.testing.assert_close(linear(states), plain + added)
