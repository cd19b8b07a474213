"""Adapters: which linears have one, PEFT's names, what is refused, and merging."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemotron_steps.artifacts.validators import sniff_type, validate_adapter
from nemotron_steps.config.schema.convert import MergeConfig
from nemotron_steps.config.schema.dpo import DpoConfig
from nemotron_steps.config.schema.policy import LoraConfig, PeftConfig
from nemotron_steps.errors import ArtifactError, ConfigError, UnsupportedError
from nemotron_steps.models import megatron_checkpoint
from nemotron_steps.models.adapters import (
    AdapterFolder,
    adapter_pairs,
    lora_candidates,
    lora_modules,
    merge_adapter,
    save_adapter,
)
from nemotron_steps.models.architecture import Architecture
from nemotron_steps.models.huggingface import load_hf_weights
from nemotron_steps.models.mapping import hf_shapes, megatron_shape, split
from nemotron_steps.runs.context import plain_context
from nemotron_steps.steps import convert
from nemotron_steps.steps.preflight import refuse_violations
from tests.models import hybrid_twins
from tests.models.checkpoints import write_checkpoint

PEFT_NAMES = {
    f"base_model.model.model.layers.{layer}.{module}.lora_{half}.weight"
    for layer in range(3)
    for module in (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    )
    for half in "AB"
}
"""As PEFT 0.21 saves a LoraConfig(target_modules="all-linear") of the tiny Qwen3."""


@pytest.fixture
def base(tmp_path):
    write_checkpoint("qwen3", tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def adapter(base, tmp_path):
    """Random A and B of rank 4 for every linear."""
    torch.manual_seed(0)
    architecture, config = Architecture.from_folder(base), PeftConfig(enabled=True, dim=4, alpha=8)
    tensors = {}
    for pair in adapter_pairs(architecture, config, key="peft"):
        linear_in = torch.randn(megatron_shape(pair.linear_in))
        for name, rows in split(pair.linear_out, torch.randn(megatron_shape(pair.linear_out)), architecture):
            tensors |= {name: rows, name.replace("lora_B", "lora_A"): linear_in}
    origin = {"base": str(base), "digest": "sha256:1"}
    save_adapter(tmp_path / "adapter", tensors.items(), config=config, every=set(hf_shapes(architecture)), **origin)
    return tmp_path / "adapter"


def test_the_folder_has_pefts_names_and_shapes(adapter):
    tensors = load_file(adapter / "adapter_model.safetensors")
    assert tensors.keys() == PEFT_NAMES
    shapes = {name.partition("layers.0.")[2]: tuple(t.shape) for name, t in tensors.items() if ".0." in name}
    assert shapes["self_attn.q_proj.lora_A.weight"] == (4, 64) and shapes["self_attn.q_proj.lora_B.weight"] == (64, 4)
    assert shapes["self_attn.k_proj.lora_B.weight"] == (32, 4) and shapes["mlp.down_proj.lora_A.weight"] == (4, 96)
    assert sniff_type(adapter) == "adapter"
    assert len({file.stat().st_mode for file in adapter.iterdir()}) == 1  # that of any new file
    found = validate_adapter(adapter)
    assert (found["rank"], found["alpha"], found["base"]) == (4, 8.0, "sha256:1")
    assert len(found["target_modules"]) == 7


@pytest.mark.parametrize("family", ["qwen3", "stablelm"])
def test_merging_adds_the_scaled_product_and_nothing_else(family, adapter, base, tmp_path):
    """Also of a family that only PEFT knows."""
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "model_type": family}))
    context = plain_context(
        MergeConfig(), tmp_path / "run", inputs={"adapter": adapter}, outputs={"model": "checkpoint_hf"}
    )
    convert.merge_adapter(context)
    merged, before = load_hf_weights(context.outputs["model"].path), load_hf_weights(base)
    halves = load_file(adapter / "adapter_model.safetensors")
    for name, tensor in before.items():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{stem}.lora_A.weight" in halves:
            tensor = tensor + 2.0 * halves[f"{stem}.lora_B.weight"] @ halves[f"{stem}.lora_A.weight"]
        torch.testing.assert_close(merged[name], tensor, atol=1e-5, rtol=0)


def test_a_base_of_other_shapes_is_refused(adapter, tmp_path):
    write_checkpoint("qwen3", tmp_path / "smaller", hidden_size=32)
    with pytest.raises(ArtifactError, match="does not fit"):
        merge_adapter(adapter, tmp_path / "smaller", tmp_path / "merged")


def test_a_megatron_base_merges_as_the_hugging_face_one(adapter, base, tmp_path):
    megatron_checkpoint.convert_hf_to_megatron(base, tmp_path / "megatron")
    merge_adapter(adapter, base, tmp_path / "one")
    merge_adapter(adapter, tmp_path / "megatron", tmp_path / "other")
    one, other = load_hf_weights(tmp_path / "one"), load_hf_weights(tmp_path / "other")
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_pefts_own_folder_merges_where_the_base_is_said(adapter, base, tmp_path):
    merge_adapter(adapter, None, tmp_path / "ours")
    (adapter / "base.json").unlink()
    with pytest.raises(ArtifactError, match="is not there"):
        merge_adapter(adapter, None, tmp_path / "theirs")
    merge_adapter(adapter, base, tmp_path / "theirs")
    ours, theirs = load_hf_weights(tmp_path / "ours"), load_hf_weights(tmp_path / "theirs")
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    "key, value",
    [
        ("peft_type", "LOHA"),
        ("use_dora", True),
        ("modules_to_save", ["lm_head"]),
        ("init_lora_weights", "pissa"),
        ("a_key_of_a_later_peft", 1),
    ],
)
def test_more_than_a_low_rank_sum_is_refused(key, value, adapter):
    settings = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**settings, key: value}))
    with pytest.raises(UnsupportedError, match=key):
        AdapterFolder(adapter)


def test_a_tensor_that_peft_does_not_name_is_no_part_of_an_adapter(adapter):
    file = adapter / "adapter_model.safetensors"
    save_file({**load_file(file), "model.embed_tokens.weight": torch.zeros(2, 2)}, file)
    with pytest.raises(ArtifactError, match="does not name"):
        AdapterFolder(adapter)


def test_a_half_a_wrong_rank_and_a_missing_file_are_no_artifact(adapter):
    tensors = load_file(adapter / "adapter_model.safetensors")
    name = "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"
    for broken, why in (
        ({n: t for n, t in tensors.items() if n != name}, "half"),
        ({**tensors, name: torch.zeros(96, 5)}, "another rank"),
        ({**tensors, "lm_head.weight": torch.zeros(2, 2)}, "neither lora_A nor lora_B"),
    ):
        save_file(broken, str(adapter / "adapter_model.safetensors"))
        with pytest.raises(ArtifactError, match=why):
            validate_adapter(adapter)
    (adapter / "adapter_config.json").unlink()
    with pytest.raises(ArtifactError, match="no adapter_config"):
        validate_adapter(adapter)


def test_a_hint_that_names_targets_takes_exclusions_back(base):
    """Both at once are refused."""
    architecture = Architecture.from_folder(base)
    with pytest.raises(ConfigError, match="no linear layer 'q_proj'") as caught:
        adapter_pairs(architecture, PeftConfig(enabled=True, exclude_modules=("q_proj",)), key="peft")
    assert caught.value.hints[0].endswith(" peft.exclude_modules=[]")
    linears = [f"model.layers.0.mixer.{leaf}" for leaf in ("in_proj", "q_proj", "v_proj")]
    with pytest.raises(ConfigError, match="in_proj cannot have an adapter") as caught:
        lora_modules(linears, LoraConfig(enabled=True, exclude_modules=("q_proj",)))
    assert caught.value.hints[0].endswith(" policy.dtensor_cfg.lora_cfg.exclude_modules=[]")


@pytest.mark.parametrize(("rooted", "scale"), [(False, 2.0), (True, 4.0)])
def test_a_rank_stabilised_adapter_is_scaled_by_its_ranks_root(rooted, scale, adapter):
    settings = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**settings, "use_rslora": rooted}))
    assert AdapterFolder(adapter).scale == scale


@pytest.mark.parametrize("name", ["qwen3", "qwen2_tied", "qwen3_moe", "latent"])
def test_they_are_transformers_own(name, tmp_path):
    from transformers import AutoModelForCausalLM

    write = hybrid_twins.write_hybrid if name in hybrid_twins.TWINS else write_checkpoint
    write(name, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).model
    linears = {f"model.{name}" for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert set(lora_candidates(Architecture.from_folder(tmp_path))) == linears


def test_what_the_dtensor_policy_would_refuse_is_refused_when_planned(tmp_path):
    hybrid_twins.write_hybrid("dense", tmp_path)

    def refused(**lora):
        dtensor = {"enabled": True, "lora_cfg": {"enabled": True, **lora}}
        policy = {"checkpoint": str(tmp_path), "dtensor_cfg": dtensor, "train_global_batch_size": 8}
        policy["max_total_sequence_length"] = 64
        refuse_violations(DpoConfig.model_validate({"policy": policy}), {})

    with pytest.raises(ConfigError, match="in_proj cannot have an adapter") as caught:
        refused()
    names = caught.value.hints[0].rpartition("=")[2].strip("[]").split(",")
    refused(match_all_linear=False, target_modules=names)
    with pytest.raises(ConfigError, match="no linear layer 'linear_qkv'"):
        refused(match_all_linear=False, target_modules=["linear_qkv"])
