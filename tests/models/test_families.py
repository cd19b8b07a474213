"""One table of families: its modules have what conversion needs, and the page says what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nemotron_steps.config.families import FAMILIES
from nemotron_steps.errors import UnsupportedError
from nemotron_steps.models.architecture import Architecture

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def test_the_page_has_the_table():
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| `(\w+)\.py` \|$", PAGE.read_text(), re.MULTILINE)
    assert rows == [(family.name, family.kind, family.module) for family in FAMILIES.values()]


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


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_act": "gelu"},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"use_sliding_window": True},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"decoder_sparse_step": 2},
        {"mlp_only_layers": [1]},
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "surprise": 1}},
    ],
    ids=str,
)
def test_what_no_decoder_computes_is_refused_and_never_left_out(changes):
    assert Architecture.from_config(QWEN3_MOE).num_experts == 4
    with pytest.raises(UnsupportedError):
        Architecture.from_config({**QWEN3_MOE, **changes})
