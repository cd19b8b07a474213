"""Adapters to generators: what they sample with is the policy's after every update."""

import pytest
import torch

from nemotron_steps.engine.generation.embedded.generator import EmbeddedGenerator
from nemotron_steps.engine.policy.megatron import MegatronPolicy
from nemotron_steps.errors import ConfigError
from nemotron_steps.models.adapters import LINEARS
from nemotron_steps.models.architecture import Architecture
from tests.engine.policy.batches import grouped_batch, lora_config, rl_loss
from tests.models.checkpoints import write_checkpoint
from tests.models.hybrid_twins import write_hybrid


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapted") / "qwen3"
    write_checkpoint("qwen3", folder, initializer_range=0.1)
    return folder


def generator_of(folder, weights, precision="float32"):
    return EmbeddedGenerator(
        Architecture.from_folder(folder),
        weights,
        max_sequences=4,
        max_total_length=64,
        dtype=getattr(torch, precision),
        eos_token_ids=(2,),
    )


def held(generator):
    """What the generator computes with, every weight where it was written."""
    return [slot.view.clone() for slot in generator._model._slots.values()]


@pytest.mark.parametrize("targets", [[], ["linear_qkv"], ["*.layers.1.mlp.linear_fc1"]], ids=str)
def test_a_generator_in_this_process_has_the_policys_weights_after_every_update(targets, folder):
    policy = MegatronPolicy(lora_config(target_modules=targets), folder, rl_loss())
    generator = generator_of(folder, policy.weights())
    for version in (1, 2):
        policy.train_step(grouped_batch(version))
        generator.update_weights(policy.weights(), version)
        fresh = generator_of(folder, list(policy.weights()))
        assert all(torch.equal(a, b) for a, b in zip(held(generator), held(fresh), strict=True))


@pytest.mark.parametrize("name", ["dense", "mixture"])
def test_a_hybrid_has_adapters_on_all_but_experts_and_its_generator_follows(name, tmp_path):
    write_hybrid("mixture", tmp_path / "refused")
    with pytest.raises(ConfigError, match="cannot have an adapter") as refused:
        MegatronPolicy(lora_config(), tmp_path / "refused", rl_loss())
    (hint,) = refused.value.hints
    targets = hint.partition("=")[2].strip("[]").split(",")
    assert {"in_proj", "out_proj"} < set(targets) <= set(LINEARS)
    write_hybrid(name, tmp_path)
    targets = targets if name == "mixture" else []
    policy = MegatronPolicy(lora_config(target_modules=targets), tmp_path, rl_loss(), reference=True)
    assert torch.equal(policy.logprobs(grouped_batch()), policy.reference_logprobs(grouped_batch()))
    generator = generator_of(tmp_path, policy.weights())
    policy.train_step(grouped_batch(1))
    generator.update_weights(policy.weights(), 1)
    fresh = generator_of(tmp_path, list(policy.weights()))
    assert all(torch.equal(a, b) for a, b in zip(held(generator), held(fresh), strict=True))
