from __future__ import annotations

import json
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from nemotron_steps.artifacts.checkpoints import read_safetensors_header
from nemotron_steps.artifacts.validators import validate
from nemotron_steps.errors import ArtifactError, DataError
from nemotron_steps.manifest.registry import load_registry
from nemotron_steps.rows.lines import LONGEST_LINE
from tests.artifacts.checkpoint_files import write_hf, write_megatron, write_safetensors

PROMPT = {"responses_create_params": {"input": [{"role": "user", "content": "2+2?"}]}, "agent_ref": {"name": "math"}}
CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
PAIR = {"prompt": "2+2?", "chosen": "4", "rejected": "5"}


def jsonl(path: Path, *values: object, tail: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in values) + tail)
    return path


def test_hf_checkpoint_attributes_are_read_from_its_files(tmp_path: Path) -> None:
    attributes = validate("checkpoint_hf", write_hf(tmp_path / "m"))
    assert attributes["architecture"] == "Qwen3ForCausalLM"
    assert (attributes["hidden_size"], attributes["vocab_size"], attributes["sequence_length"]) == (8, 16, 64)
    assert (attributes["parameters"], attributes["dtype"]) == (3, "f32")
    assert attributes["tokenizer"].startswith("sha256:") and attributes["chat_template"].startswith("sha256:")


@pytest.mark.parametrize(
    ("changes", "positions"),
    [
        ({}, 64),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8}}, 64),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}}, 128),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 128),
    ],
)
def test_positions_are_those_of_the_scaled_embedding(
    changes: dict[str, object], positions: int, tmp_path: Path
) -> None:
    folder = write_hf(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    assert validate("checkpoint_hf", folder)["sequence_length"] == positions


def test_experts_and_tokens_are_counted(tmp_path: Path) -> None:
    folder = write_hf(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_local_experts": 6, "moe_intermediate_size": 4}))
    added = [{"id": 20, "content": "<end>"}]
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 3}}, "added_tokens": added}))
    attributes = validate("checkpoint_hf", folder)
    assert (attributes["num_experts"], attributes["moe_intermediate_size"], attributes["tokenizer_size"]) == (6, 4, 21)


@pytest.mark.parametrize(("pattern", "width"), [("M*E", 96), ("M*E-", 32), ("M*-", None)])
def test_what_every_token_of_a_hybrid_goes_through_has_one_width(
    pattern: str, width: int | None, tmp_path: Path
) -> None:
    folder = write_hf(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    widths = {"moe_shared_expert_intermediate_size": 96, "intermediate_size": 64}
    hybrid = {"model_type": "nemotron_h", "hybrid_override_pattern": pattern, **widths}
    (folder / "config.json").write_text(json.dumps({**config, **hybrid}))
    assert validate("checkpoint_hf", folder).get("shared_expert_width") == width


def test_megatron_checkpoint_has_the_attributes_of_its_hf_part(tmp_path: Path) -> None:
    hf = validate("checkpoint_hf", write_hf(tmp_path / "hf"))
    megatron = validate("checkpoint_megatron", write_megatron(tmp_path / "mg"))
    assert megatron.items() <= hf.items()


def test_resaving_a_tokenizer_keeps_its_digest_and_another_vocabulary_changes_it(tmp_path: Path) -> None:
    folder = write_hf(tmp_path / "m")
    before = validate("checkpoint_hf", folder)["tokenizer"]
    last_call = {"padding": {"p": 1}, "truncation": {"max_length": 8}}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}, **last_call}, indent=2))
    assert validate("checkpoint_hf", folder)["tokenizer"] == before
    assert validate("checkpoint_hf", write_hf(tmp_path / "o", word="b"))["tokenizer"] != before


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_checkpoint_without_a_required_file_is_refused(tmp_path: Path, missing: str) -> None:
    folder = write_hf(tmp_path / "m")
    (folder / missing).unlink()
    with pytest.raises(ArtifactError) as caught:
        validate("checkpoint_hf", folder)
    assert caught.value.where == str(folder) and missing.split(".")[0] in caught.value.render()


@pytest.mark.parametrize("cut", [1, 5, 20, 60])
def test_cut_off_safetensors_is_refused(tmp_path: Path, cut: int) -> None:
    folder = write_hf(tmp_path / "m")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-cut])
    with pytest.raises(ArtifactError, match="broken or cut off") as caught:
        validate("checkpoint_hf", folder)
    assert caught.value.where == str(weights)


def test_safetensors_header_matches_the_library(tmp_path: Path) -> None:
    import numpy
    from safetensors.numpy import save_file

    save_file({"x": numpy.ones((2, 3), dtype=numpy.float16), "y": numpy.zeros(5)}, tmp_path / "t.safetensors")
    header = read_safetensors_header(tmp_path / "t.safetensors")
    assert {name: (entry["dtype"], entry["shape"]) for name, entry in header.items()} == {
        "x": ("F16", [2, 3]),
        "y": ("F64", [5]),
    }


def test_safetensors_with_an_absurd_header_length_is_refused_without_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    path.write_bytes(struct.pack("<Q", 1 << 62) + b"{}")
    with pytest.raises(ArtifactError):
        read_safetensors_header(path)


def test_sharded_checkpoint_missing_a_shard_names_it(tmp_path: Path) -> None:
    folder = write_hf(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    write_safetensors(folder / "model-1.safetensors", {"a": [1.0]})
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ArtifactError) as caught:
        validate("checkpoint_hf", folder)
    assert caught.value.expected == "model-2.safetensors"
    write_safetensors(folder / "model-2.safetensors", {"c": [1.0]})
    with pytest.raises(ArtifactError, match="no shard holds"):
        validate("checkpoint_hf", folder)


def test_pickled_weights_are_not_accepted(tmp_path: Path) -> None:
    folder = write_hf(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ArtifactError, match="pickled weights are not read"):
        validate("checkpoint_hf", folder)


@pytest.mark.parametrize(
    ("shapes", "size"),
    [
        ([("a", "F32", [2], 0, 8), ("b", "F32", [1], 12, 16)], 16),  # a hole
        ([("a", "F32", [2], 0, 8), ("b", "F32", [1], 4, 8)], 8),  # one over the other
        ([("a", "F32", [2], 0, 4)], 4),  # fewer bytes than values
        ([("a", "F32", [2], 0, 8)], 12),  # more bytes than tensors
        ([("a", "F32", [2], "0", "8")], 8),
    ],
)
def test_tensors_that_do_not_fill_their_file_are_refused(tmp_path: Path, shapes: list, size: int) -> None:
    header = json.dumps(
        {name: {"dtype": dtype, "shape": shape, "data_offsets": [*offsets]} for name, dtype, shape, *offsets in shapes}
    ).encode()
    path = tmp_path / "t.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * size)
    with pytest.raises(ArtifactError, match="broken or cut off"):
        read_safetensors_header(path)


def test_a_file_of_fewer_bytes_than_a_header_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    path.write_bytes(b"\0" * 7)
    with pytest.raises(ArtifactError) as caught:
        read_safetensors_header(path)
    assert (caught.value.expected, caught.value.found) == ("at least 8 bytes", "7 bytes")


def test_a_megatron_checkpoint_with_missing_empty_or_broken_weights_is_refused(tmp_path: Path) -> None:
    folder = write_megatron(tmp_path / "mg")
    weights = folder / "weights"
    for name, content in (("__1_0.distcp", b""), ("t.safetensors", b"\0" * 7), ("more.json", b'{"cut')):
        (weights / name).write_bytes(content)
        with pytest.raises(ArtifactError) as caught:
            validate("checkpoint_megatron", folder)
        assert str(caught.value.where).startswith(str(weights / name))
        (weights / name).unlink()
    assert validate("checkpoint_megatron", folder)
    for file in weights.iterdir():
        file.unlink()
    with pytest.raises(ArtifactError, match="has no weights"):
        validate("checkpoint_megatron", folder)


def test_a_file_of_the_checkpoint_that_is_not_json_is_named_with_its_line(tmp_path: Path) -> None:
    folder = write_hf(tmp_path / "m")
    (folder / "config.json").write_text('{\n"model_type": \n}')
    with pytest.raises(ArtifactError) as caught:
        validate("checkpoint_hf", folder)
    assert caught.value.where == f"{folder / 'config.json'}:3"


def test_an_index_that_leads_to_no_files_is_refused(tmp_path: Path) -> None:
    folder = write_hf(tmp_path / "m")
    for weight_map in ({"a": 1}, ["model.safetensors"], {}, {"a": "../m/model.safetensors"}):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ArtifactError):
            validate("checkpoint_hf", folder)


def test_any_kind_of_tokenizer_will_do_and_a_chat_template_need_not_be_there(tmp_path: Path) -> None:
    folder = write_hf(tmp_path / "m")
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    (folder / "tokenizer_config.json").write_text("{}")
    attributes = validate("checkpoint_hf", folder)
    assert attributes["tokenizer"].startswith("sha256:")
    assert attributes.get("tokenizer_size") is None and attributes.get("chat_template") is None


def test_hf_folder_given_as_megatron_suggests_the_converter(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError) as caught:
        validate("checkpoint_megatron", write_hf(tmp_path / "m"))
    (port,) = load_registry().step("convert/hf_to_megatron").consumes
    assert f"steps run convert/hf_to_megatron --input {port.name}={tmp_path / 'm'}" in caught.value.hints


@pytest.mark.parametrize(
    ("type_name", "good", "bad"),
    [
        ("rl_prompts", PROMPT, {"prompt": "2+2?"}),
        ("rl_prompts", PROMPT, {"responses_create_params": {"input": []}}),
        ("rl_prompts", PROMPT, {"_hf_placeholder": {"row": 3}, "responses_create_params": {"input": "x"}}),
        ("sft_chats", CHAT, {"messages": [{"role": "user", "content": "hi"}]}),
        ("sft_chats", CHAT, {"messages": [{"content": "hi"}]}),
        ("preference_pairs", PAIR, {"prompt": "2+2?", "chosen": "4"}),
        ("preference_pairs", PAIR, {"prompt": "2+2?", "chosen": "4", "rejected": "4"}),
        ("rl_prompts", {"responses_create_params": {"input": "2+2?"}}, {"responses_create_params": {"input": " "}}),
        ("rl_prompts", PROMPT, {"responses_create_params": {"input": ["2+2?"]}}),
        ("sft_chats", CHAT, {"messages": "hi"}),
        ("sft_chats", CHAT, {"messages": []}),
        ("sft_chats", CHAT, {"messages": [{"role": "assistant", "content": None}]}),
        ("preference_pairs", {**PAIR, "prompt": CHAT["messages"]}, {**PAIR, "prompt": [{"content": "hi"}]}),
        ("preference_pairs", {"context": "2+2?", "chosen": "4", "rejected": "5"}, {"chosen": "4", "rejected": "5"}),
        ("preference_pairs", PAIR, {**PAIR, "chosen": ""}),
        ("training_jsonl", {"x": 1}, [1, 2]),
    ],
)
def test_bad_row_is_named_by_file_and_line(tmp_path: Path, type_name: str, good: object, bad: object) -> None:
    path = jsonl(tmp_path / "d" / "train.jsonl", good, good)
    assert validate(type_name, tmp_path / "d")["rows"] == {"train": 2}
    jsonl(path, good, good, bad, good)
    with pytest.raises(DataError) as caught:
        validate(type_name, tmp_path / "d")
    assert str(caught.value.where).partition(" field ")[0] == f"{path}:3"


def test_a_complete_last_line_needs_no_newline(tmp_path: Path) -> None:
    jsonl(tmp_path / "d" / "train.jsonl", {"x": 1}, tail='{"x": 2}')
    assert validate("training_jsonl", tmp_path / "d")["rows"] == {"train": 2}


@pytest.mark.parametrize(
    "report",
    [
        '{"metrics": {}}',
        '{"metrics": {"a": "b"}}',
        '{"metrics": {"a": true}}',
        '{"metrics": {"a": 1, "b": null}}',
        "[1]",
    ],
)
def test_eval_report_needs_numeric_metrics(tmp_path: Path, report: str) -> None:
    (tmp_path / "report.json").write_text(report)
    with pytest.raises(ArtifactError):
        validate("eval_report", tmp_path)
    (tmp_path / "report.json").write_text('{"metrics": {"a": 1, "b": 0.5}}')
    assert validate("eval_report", tmp_path) == {"metrics": {"a": 1, "b": 0.5}}
    (tmp_path / "report.json").write_text('{"reward": 0.5, "by_environment": {"math": 1}}')
    assert validate("eval_report", tmp_path) == {"metrics": {"reward": 0.5}}


def test_an_evaluation_without_a_report_or_with_metrics_of_another_shape_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"no report\.json"):
        validate("eval_report", tmp_path)
    (tmp_path / "report.json").write_text('{"metrics": [0.5]}')
    with pytest.raises(ArtifactError, match="not an object"):
        validate("eval_report", tmp_path)


def test_the_layer_imports_nothing_heavy() -> None:
    code = (
        "import sys, nemotron_steps.artifacts.store, nemotron_steps.artifacts.lineage;"
        "print([m for m in ('torch','ray','vllm','hydra','wandb','transformers','s3fs','fsspec','pydantic')"
        " if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_a_line_longer_than_any_row_is_told_before_it_is_in_memory(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    with file.open("wb") as out:
        out.write(b'{"a": 1}\n')
        out.truncate(400 << 20)  # a hole: a line of 400 MiB that takes no disk
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="too long") as caught:
            validate("training_jsonl", file)
        assert tracemalloc.get_traced_memory()[1] < 3 * LONGEST_LINE
    finally:
        tracemalloc.stop()
    assert caught.value.where == f"{file}:2"


@pytest.mark.parametrize("type_name", ["checkpoint_hf", "checkpoint_megatron", "adapter"])
def test_a_file_given_for_a_checkpoints_folder_is_told(tmp_path: Path, type_name: str) -> None:
    config = write_hf(tmp_path / "m") / "config.json"
    with pytest.raises(ArtifactError) as caught:
        validate(type_name, config)
    assert caught.value.found == "a file"


def test_json_that_is_nested_too_deeply_to_read_is_an_artifact_error(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text("[" * 100_000)
    with pytest.raises(ArtifactError, match="not JSON"):
        validate("eval_report", tmp_path)
