"""Nemotron-H checkpoints through Megatron's format and back: every bit, every file, and what is refused on the way."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemotron_steps.artifacts.validators import validate
from nemotron_steps.engine.policy.hf_model import load_hf_model
from nemotron_steps.models.architecture import Architecture
from nemotron_steps.models.chat import ChatFormat
from nemotron_steps.models.huggingface import load_hf_weights
from nemotron_steps.models.mapping import shard, to_megatron, unshard
from nemotron_steps.models.megatron_checkpoint import (
    Place,
    convert_hf_to_megatron,
    convert_megatron_to_hf,
    load_megatron_weights,
    sharded_tensors,
)
from nemotron_steps.models.megatron_core import load_megatron_core
from tests.models.hybrid_twins import hybrid_model, write_hybrid

FLOAT32 = (".A_log", ".D", ".dt_bias", "e_score_correction_bias")


def as_on_the_hub(folder, name="mtp", **changes):
    """A twin in bfloat16 but for what the hub has in float32, its old config, its custom code and generation config."""
    write_hybrid(name, folder, old_config=True, **changes)
    weights = load_file(folder / "model.safetensors")
    half = {key: tensor if key.endswith(FLOAT32) else tensor.bfloat16() for key, tensor in weights.items()}
    save_file(half, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 11], "temperature": 1.0}))
    config = json.loads((folder / "config.json").read_text())
    config["torch_dtype"] = "bfloat16"
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return config


def test_a_hub_folder_comes_back_whole(tmp_path):
    config = as_on_the_hub(tmp_path / "hub")
    convert_hf_to_megatron(tmp_path / "hub", tmp_path / "megatron")
    validate("checkpoint_megatron", tmp_path / "megatron")
    convert_megatron_to_hf(tmp_path / "megatron", tmp_path / "back")
    before, after = load_hf_weights(tmp_path / "hub"), load_hf_weights(tmp_path / "back")
    assert set(before) == set(after)
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype and torch.equal(tensor, after[name]), name
    assert {str(tensor.dtype) for name, tensor in after.items() if name.endswith("A_log")} == {"torch.float32"}
    assert sum(name.startswith("mtp.") for name in after) == 32
    assert json.loads((tmp_path / "back/config.json").read_text()) == config
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "hub" / name).read_bytes()


def test_tensors_that_become_one_are_as_wide_as_the_widest_and_keep_their_values(tmp_path):
    write_hybrid("latent", tmp_path / "hub")
    types = [torch.float32, torch.bfloat16, torch.float16]
    whole = load_hf_weights(tmp_path / "hub")
    mixed = {name: whole[name].to(types[number % 3]) for number, name in enumerate(sorted(whole))}
    save_file(mixed, tmp_path / "hub/model.safetensors", metadata={"format": "pt"})
    convert_hf_to_megatron(tmp_path / "hub", tmp_path / "megatron")
    convert_megatron_to_hf(tmp_path / "megatron", tmp_path / "back")
    after = load_hf_weights(tmp_path / "back")
    for name, tensor in mixed.items():
        fused = ".experts." in name or name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
        assert after[name].dtype == (torch.float32 if fused else tensor.dtype), name
        assert torch.equal(after[name], tensor.to(after[name].dtype)), name


def test_custom_code_in_a_hub_folder_is_never_run(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    hub, marker = tmp_path / "hub", tmp_path / "executed"
    write_hybrid("dense", hub)
    for stem in ("configuration_nemotron_h", "modeling_nemotron_h"):
        (hub / f"{stem}.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    config = json.loads((hub / "config.json").read_text())
    config["auto_map"] = {
        "AutoConfig": "configuration_nemotron_h.NemotronHConfig",
        "AutoModelForCausalLM": "modeling_nemotron_h.NemotronHForCausalLM",
    }
    (hub / "config.json").write_text(json.dumps(config))
    convert_hf_to_megatron(hub, tmp_path / "megatron")
    convert_megatron_to_hf(tmp_path / "megatron", tmp_path / "back")
    ChatFormat.from_folder(hub)
    load_hf_model(hub, activation_checkpointing=False)
    AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    AutoTokenizer.from_pretrained(tmp_path / "back")
    assert not marker.exists() and not list((tmp_path / "back").glob("*.py"))
    del config["auto_map"]  # it would name files that are not there
    assert json.loads((tmp_path / "back/config.json").read_text()) == config


def test_tensor_parallel_ranks_hold_their_heads_of_every_part(tmp_path):
    model = hybrid_model("dense")
    model.save_pretrained(tmp_path)
    architecture, mamba = Architecture.from_folder(tmp_path), Architecture.from_folder(tmp_path).mamba
    megatron = {p.name: (p, tensor) for p, tensor in to_megatron(load_hf_weights(tmp_path), architecture)}
    inner, shared = mamba.inner_size, mamba.num_groups * mamba.state_size
    parameter, whole = megatron["decoder.layers.0.mixer.in_proj.weight"]
    z, x, b, c, dt = torch.split(whole, [inner, inner, shared, shared, mamba.num_heads])
    second = torch.cat([part[part.shape[0] // 2 :] for part in (z, x, b, c, dt)])
    assert torch.equal(shard(parameter, whole, 1, 2), second)
    for parameter, whole in megatron.values():
        for size in (2, 4):
            assert torch.equal(unshard(parameter, [shard(parameter, whole, r, size) for r in range(size)]), whole)
    assert shard(*megatron["decoder.layers.0.mixer.A_log"], 1, 4).shape == (2,)


def test_checkpoint_keys_are_megatron_cores(tmp_path):
    """Of its hybrid model: layers keep their numbers, the parts of in_proj and conv1d are tensors of their own."""
    load_megatron_core()
    model = hybrid_model("latent")
    model.save_pretrained(tmp_path)
    architecture = Architecture.from_folder(tmp_path)
    shards = {}
    for parameter, tensor in to_megatron(load_hf_weights(tmp_path), architecture):
        place = Place(tensor_rank=1, tensor_size=2, expert_rank=1, expert_size=4)
        part = shard(parameter, tensor, 1, 2)
        part = tensor.chunk(4)[1] if parameter.of_experts else part
        shards.update({each.key: each for each in sharded_tensors(parameter, part, architecture, place)})
    dt = shards["decoder.layers.0.mixer.in_proj.weight.dt"]
    assert (dt.global_shape, dt.global_offset, dt.local_shape) == ((8, 64), (4, 0), (4, 64))
    x = shards["decoder.layers.0.mixer.conv1d.bias.x"]
    assert (x.global_shape, x.global_offset) == ((128,), (64,))
    experts = shards["decoder.layers.1.mlp.experts.linear_fc1.weight"]
    assert (experts.global_shape, experts.global_offset) == ((8, 24, 32), (2, 0, 0))
    for key in (
        "decoder.layers.0.mixer.in_proj.layer_norm_weight",
        "decoder.layers.1.pre_mlp_layernorm.weight",
        "decoder.layers.1.mlp.fc1_latent_proj.weight",
        "decoder.layers.1.mlp.shared_experts.linear_fc2.weight",
        "decoder.layers.2.self_attention.linear_qkv.layer_norm_weight",
        "decoder.final_norm.weight",
    ):
        assert key in shards, key


def test_a_tied_flag_changes_nothing_as_in_transformers_and_vllm(tmp_path):
    write_hybrid("dense", tmp_path / "hf", tie_word_embeddings=True)
    weights = load_hf_weights(tmp_path / "hf")
    assert not torch.equal(weights["lm_head.weight"], weights["backbone.embeddings.weight"])
    convert_hf_to_megatron(tmp_path / "hf", tmp_path / "megatron")
    loaded = load_megatron_weights(tmp_path / "megatron/weights", Architecture.from_folder(tmp_path / "hf"))
    assert torch.equal(loaded["output_layer.weight"], weights["lm_head.weight"])


@pytest.mark.parametrize("name", ["dense", "mtp"])
def test_the_export_of_an_old_folder_gives_transformers_the_same_logits_and_text(name, tmp_path):
    from transformers import AutoModelForCausalLM

    model = hybrid_model(name)
    write_hybrid(name, tmp_path / "hf", old_config=True)
    convert_hf_to_megatron(tmp_path / "hf", tmp_path / "megatron")
    shutil.rmtree(tmp_path / "hf")
    convert_megatron_to_hf(tmp_path / "megatron", tmp_path / "back")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32)
    ids = torch.randint(3, 200, (2, 19), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(model(ids).logits, loaded(ids).logits)
        texts = [m.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None) for m in (model, loaded)]
    assert torch.equal(*texts)
