"""What a plan, and a run before its first step, say of a hub folder of equal layers whose config.json cannot be."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Cli
from tests.config.layout.memory.shapes import QWEN3_8B, QWEN3_30B_A3B
from tests.models.checkpoints import write_tokenizer


@pytest.fixture
def hub(workplace: Path) -> Path:
    """A tokenizer and an empty weights file."""
    folder = workplace / "hub"
    folder.mkdir()
    write_tokenizer(folder)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    return folder


def describe(folder: Path, config: dict[str, Any], **changes: Any) -> str:
    """The folder's config.json, as an input of a conversion."""
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 40960, **changes}))
    return f"checkpoint_hf={folder}"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 2**31 - 1}, "a num_hidden_layers that is no count"),
        ({"hidden_size": "4096"}, "a hidden_size that is no count"),
        ({"num_key_value_heads": 0}, "a num_key_value_heads that is no count"),
        ({"num_experts": 10**400}, "a num_experts that is no count"),
        ({"tie_word_embeddings": "false"}, "a tie_word_embeddings that is no truth value"),
    ],
)
def test_a_plan_refuses_sizes_that_no_model_has(cli: Cli, hub: Path, changes: dict[str, Any], said: str) -> None:
    source = describe(hub, QWEN3_30B_A3B, **changes)
    refused = cli("plan", "convert/hf_to_megatron", "--input", source)
    assert refused.code == 2 and f"config.json of {hub} has {said}" in refused.err
    assert "hint: hf download MODEL config.json" in refused.err


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rope_scaling": {"type": "yarn", "factor": math.inf}}, "rope_scaling.factor is out of range"),
        ({"rope_scaling": {"type": "yarn", "factor": {"a": 1}}}, "rope_scaling.factor is out of range"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": "32768"}},
            "rope_parameters.original_max_position_embeddings is no count",
        ),
        ({"rope_theta": 10**400}, "rope_theta is out of range"),
        ({"vocab_size": math.inf}, "vocab_size is no count"),
        ({"layer_types": 36}, "layer_types is malformed"),
        ({"norm_topk_prob": "false"}, "norm_topk_prob is no truth value"),
    ],
)
def test_what_a_plan_looks_past_stops_a_run_before_its_first_step(
    cli: Cli, workplace: Path, hub: Path, changes: dict[str, Any], said: str
) -> None:
    source = describe(hub, QWEN3_8B, **changes)
    planned = cli("plan", "convert/hf_to_megatron", "--input", source)
    assert planned.code == 0, planned.err
    refused = cli("run", "convert/hf_to_megatron", "--input", source)
    assert refused.code == 2 and said in refused.err and "hint: hf download MODEL config.json" in refused.err
    assert not list((workplace / "home" / "runs").glob("*"))
