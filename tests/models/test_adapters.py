"""Which weights adapters of some linears touch."""

from __future__ import annotations

import pytest

from nemotron_steps.models.adapters import whole_modules

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
