"""New models: drawn from a seed, complete, and read by everything that reads checkpoints."""

import pytest
import torch

from nemotron_steps.artifacts.validators import validate
from nemotron_steps.config.layout.model_spec import ModelSpec
from nemotron_steps.config.layout.parallel_config import getter
from nemotron_steps.config.schema.sft import FromScratchConfig, SftConfig
from nemotron_steps.config.turn_ends import generation_ends
from nemotron_steps.models.architecture import Architecture
from nemotron_steps.models.huggingface import load_hf_weights
from nemotron_steps.models.initialize import initialize_checkpoint
from nemotron_steps.models.megatron_checkpoint import convert_hf_to_megatron, convert_megatron_to_hf
from tests.models.checkpoints import write_tokenizer

HYBRID = {
    "architecture": "nemotron_h",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hybrid": {
        "pattern": "ME*M-",
        "n_routed_experts": 4,
        "moe_latent_size": 16,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 40,
        "num_nextn_predict_layers": 1,
    },
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, 100)
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    return folder


def test_a_new_hybrid_is_whole_and_drawn_from_its_seed(tokenizer, tmp_path):
    shape = FromScratchConfig.model_validate(HYBRID)
    for name, seed in (("one", 1), ("again", 1), ("two", 2)):
        initialize_checkpoint(shape, tokenizer, tmp_path / name, seed)
    one, again, two = (load_hf_weights(tmp_path / name) for name in ("one", "again", "two"))
    assert all(torch.equal(tensor, again[name]) for name, tensor in one.items()) and set(one) == set(again)
    name = "backbone.layers.1.mixer.experts.3.up_proj.weight"
    assert one["mtp.layers.0.eh_proj.weight"].shape == (32, 64)
    assert one[name].shape == (24, 16) and not torch.equal(one[name], two[name])
    assert not list(tmp_path.glob("*.partial"))
    assert validate("checkpoint_hf", tmp_path / "one")["num_experts"] == 4
    architecture = Architecture.from_folder(tmp_path / "one")
    assert (architecture.pattern, architecture.mtp_layers, architecture.vocab_size) == ("ME*M-", 1, 100)
    convert_hf_to_megatron(tmp_path / "one", tmp_path / "megatron")
    convert_megatron_to_hf(tmp_path / "megatron", tmp_path / "back")
    back = load_hf_weights(tmp_path / "back")
    assert all(torch.equal(tensor, back[name]) for name, tensor in one.items()) and set(one) == set(back)


@pytest.mark.parametrize("shape", [HYBRID, {"architecture": "qwen3"}], ids=["hybrid", "dense"])
def test_the_facts_of_a_config_are_those_of_the_model_it_makes(shape, tokenizer, tmp_path):
    config = SftConfig.model_validate({"from_scratch": shape})
    initialize_checkpoint(config.from_scratch, tokenizer, tmp_path / "model", 0)
    planned, made = ModelSpec.from_scratch(getter(config)), Architecture.from_folder(tmp_path / "model").facts
    assert planned == made
    assert generation_ends(tmp_path / "model") == (1, 2)  # of the tokenizer's folder; transformers would write one
