"""What a plan, and a run before its first step, say of models, and what memory they take."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.artifacts.checkpoints import validate_model_folder
from nemotron_steps.session.session import Session
from tests.cli.conftest import Cli
from tests.config.layout.memory.shapes import NANO_30B
from tests.models.checkpoints import write_tokenizer


def hub_folder(folder: Path, **changes: Any) -> Path:
    """Nano's config.json, a tokenizer and an empty weights file."""
    folder.mkdir()
    write_tokenizer(folder)
    config = {**NANO_30B, "num_hidden_layers": 52, "max_position_embeddings": 262144, **changes}
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    return folder


@pytest.mark.parametrize(
    ("changes", "override", "hint"),
    [
        ({}, "policy.megatron_cfg.mtp_num_layers=1", "policy.megatron_cfg.mtp_num_layers=0"),
        ({"time_step_limit": [0.001, 0.1]}, "grpo.max_num_steps=5", "policy.generation.backend=embedded"),
        (
            {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 5},
            "policy.megatron_cfg.tensor_model_parallel_size=4",
            "policy.megatron_cfg.tensor_model_parallel_size=2",
        ),
    ],
)
def test_what_a_layout_asks_of_a_model_is_refused_across_a_conversion_too(
    cli: Cli, workplace: Path, changes: dict[str, Any], override: str, hint: str
) -> None:
    policy = hub_folder(workplace / "hub", **changes)
    command = ("run", "rl/nemo_rl/rlvr", "-c", "nano3", "-d", "--input", f"policy={policy}")
    refused = cli(*command, override)
    assert refused.code == 2 and f"hint: {hint}" in refused.err, refused.err


def test_a_checkpoint_that_modelopt_quantised_is_refused_when_planned(cli: Cli, workplace: Path) -> None:
    policy = hub_folder(workplace / "hub")
    (policy / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    refused = cli("plan", "rl/nemo_rl/rlvr", "-c", "tiny_hybrid", "--input", f"policy={policy}")
    assert refused.code == 2 and "is quantised" in refused.err and "hf_quant_config.json" in refused.err
    whole = f"{policy}-BF16"
    assert f"hint: hf download MODEL-BF16 --local-dir {whole}   # then --input policy={whole}" in refused.err


def test_types_declare_what_is_recorded_of_a_checkpoint(tmp_path: Path) -> None:
    """Outputs that inherit an attribute have it only if their type declares it."""
    changes = {
        "architectures": ["NemotronHForCausalLM"],
        "time_step_limit": [0.0, 0.1],
        "quantization_config": {"a": 1},
    }
    recorded = validate_model_folder(hub_folder(tmp_path / "hub", num_nextn_predict_layers=1, **changes))
    assert {"mtp_layers", "bounded_time_steps", "head_dim", "quantised"} <= recorded.keys()
    types = Session(home=str(tmp_path / "home")).registry.types.types
    for name in ("checkpoint_hf", "checkpoint_megatron"):
        assert recorded.keys() <= types[name].attributes.keys()
