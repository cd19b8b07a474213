"""What a plan, and a run before its first step, say of models, and what memory they take."""

from __future__ import annotations

import io
import json
import math
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemotron_steps.artifacts.checkpoints import validate_model_folder
from nemotron_steps.cli.plans import _show_memory
from nemotron_steps.cli.terminal import Terminal
from nemotron_steps.session.run_request import RunRequest
from nemotron_steps.session.session import Session
from tests.cli.conftest import Cli
from tests.config.layout.memory.shapes import NANO_30B, QWEN3_8B, QWEN3_30B_A3B
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
        ({"num_hidden_layers": 2**31 - 1}, "a num_hidden_layers that is not a count"),
        ({"hidden_size": "4096"}, "a hidden_size that is not a count"),
        ({"num_key_value_heads": 0}, "a num_key_value_heads that is not a count"),
        ({"num_experts": 10**400}, "a num_experts that is not a count"),
        ({"tie_word_embeddings": "false"}, "a tie_word_embeddings that is not true or false"),
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
            "rope_parameters.original_max_position_embeddings must be a whole number",
        ),
        ({"rope_theta": 10**400}, "rope_theta is out of range"),
        ({"vocab_size": math.inf}, "vocab_size must be a whole number"),
        ({"layer_types": 36}, "layer_types is malformed"),
        ({"norm_topk_prob": "false"}, "norm_topk_prob must be true or false"),
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


@pytest.mark.parametrize(
    "step", ["rl/nemo_rl/rlvr -c tiny_hybrid --input policy", "convert/hf_to_megatron --input checkpoint_hf"]
)
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hybrid_override_pattern": "MEX"}, "layers of a kind that does not exist"),
        ({"num_hidden_layers": 51}, "a layer pattern of another length than num_hidden_layers"),
        ({"hidden_size": 10**400}, "a hidden_size that is not a count"),
        ({"time_step_limit": [0, 10**400]}, None),  # told when a run starts
    ],
)
def test_a_plan_reads_what_a_models_config_says_of_its_layers(
    cli: Cli, workplace: Path, step: str, changes: dict[str, Any], said: str | None
) -> None:
    """And never stumbles over it."""
    policy = hub_folder(workplace / "hub", **changes)
    result = cli("plan", *f"{step}={policy}".split())
    assert result.code == (2 if said else 0), result.err
    assert said is None or (f"config.json of {policy} has {said}" in result.err and "hint: " in result.err)


@pytest.mark.parametrize("text", ["", "[1]", "[" * 100_000])
def test_a_config_that_is_no_json_object_is_refused_with_a_hint(cli: Cli, workplace: Path, text: str) -> None:
    policy = hub_folder(workplace / "hub")
    (policy / "config.json").write_text(text)
    refused = cli("plan", "rl/nemo_rl/rlvr", "-c", "tiny_hybrid", "--input", f"policy={policy}")
    assert refused.code == 2 and f"hint: hf download MODEL --local-dir {policy}" in refused.err


ROW = {"responses_create_params": {"input": "A or B?"}, "agent_ref": {"name": "mcqa_simple_agent"}}


@pytest.fixture
def inputs(workplace):
    """A Megatron checkpoint of Qwen3-8B without its weights, and prompts."""
    hf = workplace / "policy" / "hf"
    hf.mkdir(parents=True)
    (hf / "config.json").write_text(json.dumps({**QWEN3_8B, "max_position_embeddings": 40960}))
    write_tokenizer(hf)
    (workplace / "policy" / "weights").mkdir()
    (workplace / "policy" / "weights" / "common.json").write_text("{}")
    (workplace / "prompts").mkdir()
    (workplace / "prompts" / "train.jsonl").write_text(json.dumps(ROW) + "\n")
    return ("--input", f"policy={workplace / 'policy'}", "--input", f"prompts={workplace / 'prompts'}")


def test_a_plan_shows_memory_by_role_and_phase_and_the_batch(cli, inputs):
    out = cli("plan", "rl/nemo_rl/rlvr", "-c", "one_node", *inputs).out
    text = " ".join(out.split())
    assert "64 prompts × 8 = 512 rollouts → global batch 512 × 1 update → 4 data-parallel ranks × 128" in text
    assert "at most 36 micro-batches of 16,384 tokens" in text
    rows = [line.split() for line in out[out.index("one GPU of 80 GiB that trains and generates") :].splitlines()]
    assert rows[1] == ["GiB", "generate", "train"]
    assert rows[2][:3] == ["policy", "weights", "7.6"]
    lines = {row[-3] for row in rows[2:] if len(row) > 2}
    assert lines >= {"weights", "optimizer", "gradients", "activations", "logprobs", "cache", "context"}
    total = next(row for row in rows if row and row[0] == "total")
    rows = rows[: rows.index(total)]
    assert "cache of one generator of vLLM's: room for about" in text
    parts = [float(row[-1]) for row in rows[2:] if row[-1] != "-"]
    assert float(total[-1]) == pytest.approx(sum(parts), abs=0.6)


def test_json_has_the_same_in_bytes(cli, inputs):
    step = cli("plan", "rl/nemo_rl/rlvr", "-c", "one_node", *inputs, "--json").json["steps"][-1]
    memory = step["memory"]
    assert 100_000 < memory["cache_tokens"]["generator"] < 130_000
    assert memory["batch"]["rollouts"] == 512 and memory["batch"]["tokens"] == 16_384
    (device,) = memory["devices"]
    assert device["capacity"] == 80 * 2**30
    for phase in ("generate", "train"):
        assert device["phases"][phase]["total"] == sum(device["phases"][phase]["lines"].values())
    assert device["peak"] == max(phase["total"] for phase in device["phases"].values())


@pytest.mark.parametrize("width", [50, 80])
def test_a_narrow_terminal_cuts_no_number(width, inputs):
    values = dict(text.partition("=")[::2] for text in inputs[1::2])
    plan = Session(home="home").plan(RunRequest(targets=("rl/nemo_rl/rlvr",), config="one_node", inputs=values))
    stream = io.StringIO()
    _show_memory(plan, Terminal(stream, color=False, width=width))
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in stream.getvalue()


@pytest.mark.parametrize("cached", [None, {"model": "model:v1"}])
def test_the_ends_of_a_models_turns_are_shown_of_a_step_that_is_to_run(cached):
    stream = io.StringIO()
    ends = {"policy": ("<|im_end|>", "<|endoftext|>")}
    step = SimpleNamespace(key="rlvr", memory=None, cached=cached, turn_ends=ends)
    _show_memory(SimpleNamespace(steps=[step]), Terminal(stream, color=False, width=None))
    said = [] if cached else ["", "rlvr", "a turn of policy ends with <|im_end|> or <|endoftext|>"]
    assert [line.strip() for line in stream.getvalue().splitlines()] == said
