"""Adapters of the dtensor policy: what they start as, learn, leave behind and give generators."""

from __future__ import annotations

import pytest
import torch

from nemotron_steps.config.schema.peft import LoraConfig
from nemotron_steps.engine.policy.dtensor import DTensorPolicy
from nemotron_steps.engine.policy.lora import HfAdapters
from nemotron_steps.engine.weight_sync.adapted import FrozenWeights
from nemotron_steps.engine.weight_sync.plan import WeightPlan
from nemotron_steps.errors import ConfigError
from nemotron_steps.models.adapters import merge_adapter
from nemotron_steps.models.huggingface import load_hf_weights
from tests.engine.policy.batches import grouped_batch, hf_token_logprobs, policy_config, rl_loss
from tests.engine.weight_sync.test_adapted import generator_of, held
from tests.models.checkpoints import write_checkpoint


def lora_config(precision="float32", **lora):
    settings = {"enabled": True, "lora_cfg": {"enabled": True, "dim": 4, "alpha": 8, **lora}}
    return policy_config(precision=precision, dtensor_cfg=settings, megatron_cfg={"optimizer": {"lr": 1e-2}})


def test_they_start_as_nothing_and_the_reference_is_the_frozen_model(qwen3_folder, batch):
    policy = DTensorPolicy(lora_config(), qwen3_folder, rl_loss(), reference=True)
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
    policy = DTensorPolicy(lora_config(), tmp_path / "base", rl_loss())
    generator = generator_of(tmp_path / "base", policy.weights())
    for _ in range(2):
        policy.train_step(batch)
    report = generator.update_weights(policy.weights(), 1)
    assert report.bytes == policy.weights().bytes
    fresh = generator_of(tmp_path / "base", list(policy.weights()))
    assert all(torch.equal(a, b) for a, b in zip(held(generator), held(fresh), strict=True))
    policy.save_adapter(tmp_path / "adapter", str(tmp_path / "base"), "")
    merge_adapter(tmp_path / "adapter", None, tmp_path / "merged")
    merged, live = load_hf_weights(tmp_path / "merged"), dict(policy.weights())
    assert max(float((merged[each] - live[each]).abs().max()) for each in merged) < 1e-6
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    torch.testing.assert_close(hf_token_logprobs(model, batch).detach(), policy.logprobs(batch), atol=2e-5, rtol=0)


def test_frozen_weights_and_halves_of_adapters_make_the_changed_weights_where_they_arrive(qwen3_folder, batch):
    policy = DTensorPolicy(
        lora_config(match_all_linear=False, target_modules=["v_proj", "o_proj"]), qwen3_folder, rl_loss()
    )
    policy.train_step(batch)
    weights, started = policy.weights(), load_hf_weights(qwen3_folder)
    arriving = FrozenWeights()
    arriving.expect(WeightPlan.of(weights.adapters()))
    frozen = {name: tensor.clone() for name, tensor in arriving.through(weights.frozen())}
    assert set(frozen) == set(started) and all(torch.equal(frozen[name], started[name]) for name in frozen)
    changed, expected = dict(arriving.through(weights.adapters())), dict(weights.changed())
    assert set(changed) == set(expected) and len(changed) == 6
    for name, tensor in changed.items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-6, rtol=0)
        assert not torch.equal(tensor, started[name])
    assert not weights.whole_modules  # v_proj is a third of what vLLM has of it


def test_resuming_equals_an_unbroken_run_bit_for_bit(qwen3_folder, tmp_path):
    config = lora_config("bfloat16", dropout=0.1)
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
    policy = DTensorPolicy(lora_config(match_all_linear=False, target_modules=["q_proj"]), qwen3_folder, rl_loss())
    assert policy._adapters.names == {f"model.layers.{n}.self_attn.q_proj.weight" for n in range(3)}
    with pytest.raises(ConfigError, match="no linear layer 'linear_qkv'"):
        DTensorPolicy(lora_config(match_all_linear=False, target_modules=["linear_qkv"]), qwen3_folder, rl_loss())


@pytest.mark.parametrize(
    "dtensor, key",
    [
        ({"lora_cfg": {"enabled": True}, "enabled": False}, "lora_cfg.enabled|lora_cfg is for"),
        ({"lora_cfg": {"enabled": True, "target_modules": ["q_proj"]}}, "match_all_linear"),
        ({"lora_cfg": {"enabled": True}, "tensor_parallel_size": 2}, "tensor-parallel"),
        ({"lora_cfg": {"enabled": True, "dropout": 0.1}, "activation_checkpointing": True}, "dropout"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_settings_without_a_meaning_are_refused(dtensor, key):
    with pytest.raises(ValueError, match=key):
        policy_config(dtensor_cfg={"enabled": True, **dtensor}, megatron_cfg={})


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
def test_dropout_is_of_an_adapters_input_or_output_and_of_training_alone(position):
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


def test_an_a_is_drawn_from_the_seed_as_it_is_asked_for():
    drawn = {
        (seed, how): adapted_linear(400, seed=seed, lora_A_init=how)[0].lora_A.weight.detach()
        for seed, how in ((0, "uniform"), (1, "uniform"), (0, "xavier"))
    }
    assert torch.equal(drawn[0, "uniform"], adapted_linear(400)[0].lora_A.weight)
    assert not torch.equal(drawn[0, "uniform"], drawn[1, "uniform"])
    assert float(drawn[0, "uniform"].abs().max()) == pytest.approx(400**-0.5, rel=0.01)  # Kaiming's bound
    assert float(drawn[0, "xavier"].std()) == pytest.approx((2 / 404) ** 0.5, rel=0.1)
