"""Which weights adapters of some linears touch."""

from __future__ import annotations

import pytest

from nemotron_steps.models.adapters import hf_weight, is_half, peft_name, whole_modules

LAYER = "model.layers.0."
EVERY = {
    f"{LAYER}{name}.weight"
    for name in (*(f"self_attn.{each}_proj" for each in "qkvo"), "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
}
QKV = {f"{LAYER}self_attn.{each}_proj.weight" for each in "qkv"}


@pytest.mark.parametrize(
    ("adapted", "biases", "whole"),
    [
        (EVERY, set(), True),
        (QKV, set(), True),
        ({f"{LAYER}self_attn.o_proj.weight"}, {f"{LAYER}self_attn.q_proj.bias"}, True),
        (QKV - {f"{LAYER}self_attn.k_proj.weight"}, set(), False),
        ({f"{LAYER}mlp.up_proj.weight"}, set(), False),
        (QKV, {f"{LAYER}self_attn.q_proj.bias"}, False),
    ],
)
def test_a_fused_module_is_whole_with_all_its_projections_and_biases(adapted, biases, whole):
    assert whole_modules(adapted, EVERY | biases) is whole


@pytest.mark.parametrize(
    "name", ["lm_head.lora_A.weight", "base_model.model.a.weight", "base_model.model.a.lora_C.weight"]
)
def test_a_tensor_that_is_none_of_pefts_has_no_weight(name):
    assert not is_half(name)
    with pytest.raises(ValueError, match=name):
        hf_weight(name)


@pytest.mark.parametrize("letter", ["A", "B"])
def test_a_half_has_the_name_of_its_weight(letter):
    name = peft_name(f"{LAYER}mlp.up_proj.weight", letter)
    assert name == f"base_model.model.{LAYER}mlp.up_proj.lora_{letter}.weight" and is_half(name)
    assert hf_weight(name) == f"{LAYER}mlp.up_proj.weight"
