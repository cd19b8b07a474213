"""What a plan says of a layout that does not come out even: each cause once, and nothing that is refused in turn."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Cli, Result
from tests.config.layout.memory.shapes import NANO_30B, QWEN3_8B, QWEN3_30B_A3B, SUPER_120B
from tests.models.checkpoints import write_tokenizer

MODELS: dict[str, dict[str, Any]] = {
    "nano": {**NANO_30B, "num_hidden_layers": 52},
    "super": {**SUPER_120B, "num_hidden_layers": len(SUPER_120B["hybrid_override_pattern"])},
    "qwen8b": QWEN3_8B,
    "qwen30b": QWEN3_30B_A3B,
}
CUT = "policy.megatron_cfg.{}_model_parallel_size={}"


@pytest.fixture
def models(workplace: Path) -> Path:
    """Folders of public models' config.json, a tokenizer and no weights."""
    for name, config in MODELS.items():
        folder = workplace / name
        folder.mkdir()
        write_tokenizer(folder)
        values = {**config, "max_position_embeddings": 262_144}
        (folder / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    return workplace


def hints(result: Result) -> list[str]:
    return [line.partition("hint: ")[2] for line in result.err.splitlines() if "hint: " in line]


def problems(result: Result) -> list[str]:
    """Without the line that sums them up."""
    return [line for line in result.err.splitlines() if line.startswith("error[") and "E300" not in line]


def test_an_override_for_a_step_that_is_not_the_last_is_offered_under_its_name(cli: Cli, models: Path) -> None:
    first, key = "sft/megatron_bridge", CUT.partition("=")[0].format("tensor")
    command = ("run", "-d", first, "rl/nemo_rl/rlvr", "-c", "one_node", "--input", f"model={models / 'qwen8b'}")
    refused = cli(*command, f"{first}.{key}=3")
    assert hints(refused) == [f"{first}.{key}=4"]
    assert cli(*command, *hints(refused)).code == 0


APART = "opd.on_policy_distillation.non_colocated_teachers"


@pytest.mark.parametrize(
    ("wrong", "more"),
    [
        (f"opd.{CUT}", ()),
        (
            f"{APART}.default_teacher_cfg.{CUT.partition('cfg.')[2]}",
            (f"{APART}.enabled=true", "opd.cluster.num_nodes=3"),
        ),
    ],
)
def test_a_layout_that_teachers_share_is_told_once(cli: Cli, models: Path, wrong: str, more: tuple[str, ...]) -> None:
    command = ("run", "-d", "opd", "--input", f"sft.model={models / 'qwen8b'}", *more)
    refused = cli(*command, wrong.format("tensor", 3))
    assert len(problems(refused)) == 1 and hints(refused) == [wrong.format("tensor", 4)], refused.err
    assert cli(*command, *hints(refused)).code == 0


def test_an_option_with_a_key_of_its_own_is_taken_away_from_its_stage(cli: Cli, workplace: Path) -> None:
    option = "opd.policy.generation.vllm_kwargs.max_model_len"
    words = ("plan", "opd", "-c", "tiny", "opd.policy.generation.backend=vllm", f"{option}=64")
    refused = cli(*words)
    assert hints(refused)[0] == f"~{option} opd.policy.max_total_sequence_length=64"
    assert "has a key of its own" not in cli(*words, *hints(refused)[0].split(" ")).err
