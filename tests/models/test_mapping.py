"""How the parameters of each family are cut over tensor-parallel ranks, and laid out in them."""

from dataclasses import replace

import pytest

from nemotron_steps.config.schema.policy import PeftConfig
from nemotron_steps.errors import ConfigError
from nemotron_steps.models.adapters import adapter_pairs
from nemotron_steps.models.architecture import Architecture
from nemotron_steps.models.mapping import megatron_shape, of_mtp, parameters

ROWS = ("word_embeddings", "output_layer", "linear_qkv", "linear_fc1", "in_proj", "conv1d", "dt_bias", "A_log", ".D",
        "mixer.norm")  # fmt: skip
COLUMNS = ("linear_proj", "linear_fc2", "out_proj")
QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
DENSE = {"num_key_value_heads": 4, **QWEN3_MOE, "model_type": "qwen2"}
HYBRID = {
    "model_type": "nemotron_h",
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hybrid_override_pattern": "ME*-",
    "mamba_num_heads": 8,
    "mamba_head_dim": 4,
    "ssm_state_size": 8,
    "n_groups": 2,
    "conv_kernel": 4,
    "chunk_size": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "moe_latent_size": 32,
    "num_nextn_predict_layers": 2,
}


@pytest.mark.parametrize("config", [DENSE, QWEN3_MOE, HYBRID], ids=lambda config: config["model_type"])
def test_rows_or_columns_are_cut_and_norms_routers_and_experts_are_whole(config) -> None:
    architecture = replace(Architecture.from_config(config), trains_mtp=True)
    for parameter in parameters(architecture):
        name = parameter.name.removesuffix(".weight").removesuffix(".bias")
        whole = ".experts." in name or "latent_proj" in name or "eh_proj" in name
        cut = 0 if name.endswith(ROWS) else 1 if name.endswith(COLUMNS) else None
        assert parameter.tp_dim == (None if whole else cut), parameter.name
        assert parameter.of_experts == (".experts." in name)
        assert (parameter.layer is None) == (not parameter.name.startswith(("decoder.layers.", "mtp.layers.")))


def test_layers_of_prediction_are_numbered_on_after_the_models_and_over_all_blocks() -> None:
    architecture = replace(Architecture.from_config(HYBRID), trains_mtp=True)
    found = {p.name: p for p in parameters(architecture) if of_mtp(p, architecture)}
    assert all(name.startswith("mtp.layers.") for name in found)
    assert {(p.layer, name.split(".")[2]) for name, p in found.items()} == {(4, "0"), (5, "0"), (6, "1"), (7, "1")}
    second = found["mtp.layers.1.eh_proj.weight"]
    assert (second.layer, second.hf_names, second.hf_shapes) == (6, ("mtp.layers.2.eh_proj.weight",), ((64, 128),))
    assert found["mtp.layers.1.final_layernorm.weight"].hf_names == ("mtp.layers.3.final_layernorm.weight",)
    router = found["mtp.layers.0.mtp_model_layer.layers.1.mlp.router.weight"]
    assert router.hf_names == ("mtp.layers.1.mixer.gate.weight",)
    assert not [p for p in parameters(replace(architecture, trains_mtp=False)) if of_mtp(p, architecture)]


def test_an_adapter_is_cut_as_its_linear_is() -> None:
    pairs = adapter_pairs(Architecture.from_config(DENSE), PeftConfig(enabled=True, dim=4), key="peft")
    first = {pair.module.rpartition(".")[2]: pair for pair in pairs if ".layers.0." in pair.module}
    cut = {name: (pair.linear_in.tp_dim, pair.linear_out.tp_dim) for name, pair in first.items()}
    assert cut == {"linear_qkv": (None, 0), "linear_proj": (1, None), "linear_fc1": (None, 0), "linear_fc2": (1, None)}
    shapes = {n: (megatron_shape(pair.linear_in), megatron_shape(pair.linear_out)) for n, pair in first.items()}
    assert shapes["linear_qkv"] == ((4, 64), (192, 4)) and shapes["linear_fc2"] == ((4, 128), (64, 4))
    assert [(pair.linear_in.layer, pair.linear_out.layer) for pair in pairs] == [(0, 0)] * 4 + [(1, 1)] * 4


@pytest.mark.parametrize(
    ("named", "said", "found"),
    [
        ({"target_modules": ("router",)}, "mlp.router cannot have an adapter", "router"),
        ({}, "linear_fc1 cannot have an adapter|mlp.router cannot have an adapter", None),
        ({"target_modules": ("linear_x",)}, "no linear layer 'linear_x'", "linear_x"),
        ({"exclude_modules": ("*",)}, "no linear layer is left", None),
    ],
)
def test_what_of_a_mixture_has_no_adapter_is_told_with_what_may(named, said, found) -> None:
    architecture = Architecture.from_config(QWEN3_MOE)
    with pytest.raises(ConfigError, match=said) as caught:
        adapter_pairs(architecture, PeftConfig(enabled=True, **named), key="peft")
    assert found is None or caught.value.found == found
    ((hint, *_),) = [[each.split(" ")[0] for each in caught.value.hints]]
    assert hint in ("peft.target_modules=[linear_qkv,linear_proj]", "peft.exclude_modules=[]")
    wanted = PeftConfig(enabled=True, target_modules=("*.layers.1.*.linear_qkv", "linear_proj"))
    chosen = [pair.module for pair in adapter_pairs(architecture, wanted, key="peft")]
    attention = "self_attention.linear_"
    assert chosen == [
        f"decoder.layers.{layer}.{attention}{name}" for layer, name in ((0, "proj"), (1, "qkv"), (1, "proj"))
    ]
