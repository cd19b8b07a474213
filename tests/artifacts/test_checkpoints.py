"""Attributes of a model's folder, one file and one key at a time."""

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.artifacts.checkpoints import (
    chat_template_digest,
    read_safetensors_header,
    tokenizer_digest,
    validate_hf,
    validate_megatron,
    validate_model_folder,
)
from nemotron_steps.errors import ArtifactError
from tests.artifacts.checkpoint_files import write_hf, write_megatron, write_safetensors


def changed(folder: Path, file: str = "config.json", **changes: Any) -> Path:
    """The folder, with keys of one of its files changed; None takes one out."""
    path = folder / file
    content = {**(json.loads(path.read_text()) if path.exists() else {}), **changes}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_hf(tmp_path / "m")


HYBRID = {"model_type": "nemotron_h", "hybrid_override_pattern": "M*M-", "mamba_num_heads": 4, "n_groups": 2}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"architectures": ["A", "B"]}, {"architecture": "A"}),
        ({"num_experts": 4}, {"num_experts": 4}),
        (
            {"text_config": {"hidden_size": 16, "max_position_embeddings": 32}},
            {"hidden_size": 16, "sequence_length": 32},
        ),
        (HYBRID, {"num_hidden_layers": 4, "mamba_num_heads": 4, "mamba_groups": 2, "mtp_layers": 0}),
        ({**HYBRID, "n_routed_experts": 8}, {"num_experts": None}),
        ({**HYBRID, "hybrid_override_pattern": "ME", "n_routed_experts": 8}, {"num_experts": 8}),
        ({**HYBRID, "time_step_limit": [0.0, 0.5]}, {"bounded_time_steps": True}),
        ({"quantization_config": {"quant_method": "fp8"}}, {"quantised": "fp8"}),
        ({"quantization_config": {"bits": 4}}, {"quantised": "unnamed"}),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 0.5}}, {"sequence_length": 64}),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}},
            {"sequence_length": 128},
        ),
        *(
            ({"rope_scaling": {"type": "yarn", "factor": bad}}, {"sequence_length": 64})
            for bad in ("2", True, {"a": 1}, math.nan, 10**400, -2.0)
        ),
    ],
)
def test_what_a_config_says(config: dict[str, Any], expected: dict[str, Any], folder: Path) -> None:
    found = validate_model_folder(changed(folder, **config))
    assert {key: found.get(key) for key in expected} == expected


def test_what_memory_depends_on_is_kept_as_the_config_has_it(folder: Path) -> None:
    changed(folder, layers_block_type=["mamba", "attention"], head_dim=4, hidden_act="silu", tie_word_embeddings=True)
    shape = validate_model_folder(folder)["shape"]
    assert shape == {
        "model_type": "qwen3",
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "vocab_size": 16,
        "layers_block_type": ["mamba", "attention"],
        "head_dim": 4,
        "tie_word_embeddings": True,
    }


def test_layers_of_multi_token_prediction_count_where_the_weights_have_them(tmp_path: Path) -> None:
    claimed = {**HYBRID, "num_nextn_predict_layers": 1}
    folder = changed(write_hf(tmp_path / "hf"), **claimed)
    write_safetensors(folder / "model.safetensors", {"model.mtp.x": [1.0]})
    assert validate_hf(folder)["mtp_layers"] == 0
    write_safetensors(folder / "model.safetensors", {"mtp.layers.0.x": [1.0]})
    assert validate_hf(folder)["mtp_layers"] == 1
    megatron = write_megatron(tmp_path / "mg")
    changed(megatron / "hf", **claimed)
    assert validate_megatron(megatron)["mtp_layers"] == 1, "its list of tensors cannot be told"
    (megatron / "weights" / ".metadata").write_bytes(b"\x80decoder.layers.0")
    assert validate_megatron(megatron)["mtp_layers"] == 0
    (megatron / "weights" / ".metadata").write_bytes(b"\x80mtp.layers.0")
    assert validate_megatron(megatron)["mtp_layers"] == 1
    (megatron / "weights" / ".metadata").write_bytes(b"\x80decoder.layers.0")
    write_safetensors(megatron / "hf" / "carried.safetensors", {"mtp.x": [1.0]})
    assert validate_megatron(megatron)["mtp_layers"] == 1


def test_a_file_of_a_header_alone_has_no_tensors(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    path.write_bytes(struct.pack("<Q", 2) + b"{}")
    assert read_safetensors_header(path) == {}
    path.write_bytes(struct.pack("<Q", 3) + b"{}")
    with pytest.raises(ArtifactError) as caught:
        read_safetensors_header(path)
    assert (caught.value.expected, caught.value.found) == ("a header of at most 2 bytes", "a header length of 3")


def test_a_pointer_in_place_of_weights_is_fetched_by_git(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n")
    with pytest.raises(ArtifactError) as caught:
        validate_hf(folder)
    assert caught.value.hints[0].startswith(f"git -C {folder} lfs pull")
    (folder / "model.safetensors").write_bytes(b"\0")
    with pytest.raises(ArtifactError) as caught:
        validate_hf(folder)
    assert caught.value.hints[0].startswith(f"hf download MODEL --local-dir {folder}")


def test_settings_of_the_last_call_and_the_order_of_keys_are_no_part_of_a_tokenizer(tmp_path: Path) -> None:
    def digest(**content: Any) -> str:
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        return tokenizer_digest(tmp_path)

    plain = digest(model={"vocab": {}}, version="1.0")
    assert digest(version="1.0", model={"vocab": {}}) == plain
    assert digest(model={"vocab": {}}, version="1.0", padding={}) == plain
    assert digest(model={"vocab": {}}, version="1.0", truncation={}) == plain
    assert digest(model={"vocab": {}}, version="2.0") != plain


@pytest.mark.parametrize(
    ("model", "added", "size"),
    [
        ({"vocab": {"a": 0, "b": 3}}, [], 4),
        ({"vocab": {"a": 0}}, [{"id": 1, "content": "x"}, {"content": "y"}, "z"], 2),
        ({"vocab": [["a", -1.0], ["b", -2.0]]}, [], 2),
        ({"vocab": [["a", -1.0], ["b", -2.0]]}, [{"id": 1}], 2),
        ({"vocab": {"a": 0, "b": "1"}}, None, 2),
        ({"vocab": {}}, [], 0),
        ({"vocab": "a"}, [], None),
        ({}, [], None),
        (None, [], None),
    ],
)
def test_a_tokenizer_has_room_for_its_largest_token(model: Any, added: Any, size: int | None, folder: Path) -> None:
    changed(folder, "tokenizer.json", model=model, added_tokens=added)
    assert validate_model_folder(folder).get("tokenizer_size") == size


PLAIN, OWN = "PreTrainedTokenizerFast", "LlamaTokenizer"


@pytest.mark.parametrize(
    ("settings", "content", "ends"),
    [
        ({"eos_token": "a"}, {}, True),
        ({"eos_token": "</s>"}, {}, False),
        ({"eos_token": {"content": "</s>"}}, {"added_tokens": [{"id": 1, "content": "</s>"}]}, True),
        ({"eos_token": "</s>", "added_tokens_decoder": {"1": {"content": "</s>"}}}, {}, True),
        ({"eos_token": "b"}, {"model": {"vocab": [["a", 0.0], ["b", 0.0]]}}, True),
        ({"eos_token": "c"}, {"model": {"vocab": [["a", 0.0], [], "c"]}}, False),
        ({"eos_token": "a"}, {"model": {}}, None),
        ({"tokenizer_class": PLAIN}, {}, False),
        ({"tokenizer_class": OWN}, {}, None),
        ({}, {}, None),
    ],
)
def test_a_tokenizer_names_an_end_token_that_it_has(
    settings: dict[str, Any], content: dict[str, Any], ends: bool | None, folder: Path
) -> None:
    changed(changed(folder, "tokenizer.json", **content), "tokenizer_config.json", **settings)
    assert validate_model_folder(folder).get("has_end_token") is ends


def test_a_chat_template_has_one_digest_wherever_it_stands(folder: Path) -> None:
    changed(folder, "tokenizer_config.json", chat_template="{{ x }}\n")
    inside = chat_template_digest(folder)
    (folder / "chat_template.jinja").write_text("{{ x }}")
    changed(folder, "tokenizer_config.json", chat_template="{{ other }}")
    assert chat_template_digest(folder) == inside and len(str(inside)) == len("sha256:") + 16
    (folder / "chat_template.jinja").unlink()
    assert chat_template_digest(folder) != inside
    changed(folder, "tokenizer_config.json", chat_template=[{"name": "default", "template": "x"}])
    assert chat_template_digest(folder) == "sha256:08a1d87f41b25d41"  # as artifacts recorded it
    assert validate_model_folder(folder)["chat_roles"] == []
    changed(folder, "tokenizer_config.json", chat_template=[{"name": "rag", "template": "x"}])
    assert str(validate_model_folder(folder).get("chat_template")).startswith("sha256:")
