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


@pytest.mark.parametrize(
    ("config", "model", "wrong", "mended"),
    [
        ("nano3", "nano", CUT.format("tensor", 3), [CUT.format("tensor", 4)]),
        ("nano3", "nano", CUT.format("expert", 7), [CUT.format("expert", 8)]),  # on one rank: too much for a GPU
        ("nano3", "nano", "cluster.num_nodes=1", ["cluster.num_nodes=2"]),
        ("small", "super", CUT.format("expert", 7), [CUT.format("expert", 8)]),
        ("one_node", "super", CUT.format("tensor", 3), []),
        ("one_node", "qwen30b", CUT.format("expert", 3), None),  # with what takes less memory
    ],
)
def test_a_cause_is_told_once_with_what_passes_when_pasted(
    cli: Cli, models: Path, config: str, model: str, wrong: str, mended: list[str] | None
) -> None:
    command = ("run", "-d", "rl/nemo_rl/rlvr", "-c", config, "--input", f"policy={models / model}")
    refused = cli(*command, wrong)
    assert refused.code == 2 and len(problems(refused)) == 1 and refused.err.count(" found: ") == 1, refused.err
    if mended == []:
        assert hints(refused) == ["steps show rl/nemo_rl/rlvr   # its configs: no sizes were found that fit here"]
        return
    assert hints(refused) and (mended is None or hints(refused) == mended)
    for hint in hints(refused):
        keys = {word.partition("=")[0] for word in hint.split()}
        passed = cli(*command, *([] if wrong.partition("=")[0] in keys else [wrong]), *hint.split())
        assert passed.code == 0, passed.err


@pytest.mark.parametrize(("model", "more", "offered"), [
    ("qwen8b", (), True), ("nano", (CUT.format("expert", 7),), False), ("super", ("cluster.num_nodes=3",), False),
])  # fmt: skip
def test_the_config_of_one_node_is_offered_only_where_its_own_plan_passes(
    cli: Cli, models: Path, model: str, more: tuple[str, ...], offered: bool
) -> None:
    def plan(config: str) -> Result:
        return cli("run", "-d", "rl/nemo_rl/rlvr", "-c", config, "--input", f"policy={models / model}", *more)

    assert ("-c one_node" in hints(plan("nano3"))) == offered
    assert (plan("one_node").code == 0) == offered


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
