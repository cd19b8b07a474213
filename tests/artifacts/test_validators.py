"""Which type a folder is, which validator looks at it, and what each validator refuses."""

import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.artifacts import validators
from nemotron_steps.artifacts.checkpoints import read_safetensors_header
from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.artifacts.validators import (
    sniff_type,
    validate,
    validate_adapter,
)
from nemotron_steps.errors import ArtifactError, DataError
from nemotron_steps.manifest.registry import load_registry
from nemotron_steps.rows.lines import LONGEST_LINE
from tests.artifacts.checkpoint_files import write_adapter, write_hf, write_megatron, write_safetensors

PROMPT = {"responses_create_params": {"input": [{"role": "user", "content": "2+2?"}]}, "agent_ref": {"name": "math"}}
CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
PAIR = {"prompt": "2+2?", "chosen": "4", "rejected": "5"}


def jsonl(path: Path, *values: object, tail: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in values) + tail)
    return path


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


def test_an_index_that_leads_to_no_files_is_refused(tmp_path: Path) -> None:
    folder = write_hf(tmp_path / "m")
    for weight_map in ({"a": 1}, ["model.safetensors"], {}, {"a": "../m/model.safetensors"}):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ArtifactError):
            validate("checkpoint_hf", folder)


def test_hf_folder_given_as_megatron_suggests_the_converter(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError) as caught:
        validate("checkpoint_megatron", write_hf(tmp_path / "m"))
    (port,) = load_registry().step("convert/hf_to_megatron").consumes
    assert f"steps run convert/hf_to_megatron --input {port.name}={tmp_path / 'm'}" in caught.value.hints


@pytest.mark.parametrize(
    ("type_name", "good", "bad"),
    [
        ("rl_prompts", PROMPT, {"prompt": "2+2?"}),
        ("sft_chats", CHAT, {"messages": [{"role": "user", "content": "hi"}]}),
        ("preference_pairs", PAIR, {"prompt": "2+2?", "chosen": "4"}),
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


CODE = """
from nemotron_steps.errors import DataError

def check(folder):
    text = (folder / "a.txt").read_text()
    if text == "bad":
        raise DataError("the text is bad", where=str(folder))
    return {"letters": len(text)}

def gives_nothing(folder):
    return None
"""


@pytest.fixture
def declared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toy_validators.py").write_text(CODE)
    (tmp_path / "toy_broken.py").write_text("import json\nraise RuntimeError('not today')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(validators, "_DECLARED", {})
    names = {"toy": "check", "toy_empty": "gives_nothing", "toy_gone": "gone"}
    validators.declare({name: f"toy_validators:{function}" for name, function in names.items()})


def folder_with(tmp_path: Path, text: str, name: str = "a.txt") -> Path:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / name).write_text(text)
    return tmp_path / "data"


def test_its_attributes_are_recorded_and_its_refusal_is_raised(tmp_path: Path, declared: None) -> None:
    store = ArtifactStore(tmp_path / "home")
    assert store.add(folder_with(tmp_path, "fine"), type_name="toy").attributes == {"letters": 4}
    (tmp_path / "data/a.txt").write_text("bad")
    with pytest.raises(DataError, match="the text is bad"):
        store.add(tmp_path / "data", type_name="toy")
    assert store.add(tmp_path / "data", type_name="other").type == "other"


def write(folder: Path, *names: str, text: str = "{}\n") -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).mkdir() if name.endswith("/") else (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["hf/x", "weights/x", "config.json"], "checkpoint_megatron"),
        (["adapter_config.json", "config.json", "tokenizer.json"], "adapter"),
        (["config.json", "train.jsonl"], "checkpoint_hf"),
        (["deep/train.jsonl", "report.json"], "training_jsonl"),
        (["report.json"], "eval_report"),
        (["notes.md"], None),
    ],
)
def test_a_folder_is_what_its_most_telling_file_says(names: list[str], kind: str | None, tmp_path: Path) -> None:
    assert sniff_type(write(tmp_path, *names)) == kind


def test_rows_are_counted_by_split_and_one_of_them_is_enough(tmp_path: Path) -> None:
    write(tmp_path, "train.jsonl", "deep/part.jsonl", text="{}\n{}\n")
    write(tmp_path, "validation.jsonl", text="\n")
    assert validate("training_jsonl", tmp_path) == {"rows": {"train": 2, "validation": 0, "deep/part": 2}}
    assert validate("training_jsonl", tmp_path / "train.jsonl") == {"rows": {"train": 2}}
    with pytest.raises(ArtifactError, match="no rows"):
        validate("training_jsonl", tmp_path / "validation.jsonl")
    with pytest.raises(ArtifactError, match="no JSON Lines file"):
        validate("training_jsonl", tmp_path / "nothing")


Q = "base.q_proj.lora_{}.weight"


def tensors(folder: Path, **shapes: list[int]) -> None:
    header: dict[str, Any] = {}
    end = 0
    for number, (name, shape) in enumerate(shapes.items()):
        size = 4 if number else 2
        for extent in shape:
            size *= extent
        header[name] = {"dtype": "F32" if number else "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    encoded = json.dumps(header).encode()
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(encoded)) + encoded + b"\0" * end)


def test_what_is_read_of_an_adapter(tmp_path: Path) -> None:
    tensors(write_adapter(tmp_path), **{Q.format("A"): [2, 5], Q.format("B"): [3, 2]})
    (tmp_path / "base.json").write_text("{}")
    assert validate_adapter(tmp_path) == {
        "rank": 2,
        "alpha": 4,
        "target_modules": ["q_proj"],
        "parameters": 10 + 6,
        "dtype": "bf16+f32",
    }
    (tmp_path / "base.json").write_text('{"digest": "sha256:1"}')
    assert validate_adapter(tmp_path)["base"] == "sha256:1"
    tensors(tmp_path, **{Q.format("A"): [1, 5], Q.format("B"): [3, 1]})
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**settings, "r": 1}))
    assert validate_adapter(tmp_path)["rank"] == 1


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors"])
def test_both_files_are_needed_and_pickled_weights_are_named(missing: str, tmp_path: Path) -> None:
    (write_adapter(tmp_path) / missing).unlink()
    with pytest.raises(ArtifactError, match=f"has no {missing}\n"):
        validate_adapter(tmp_path)
    (tmp_path / "adapter_model.bin").touch()
    with pytest.raises(ArtifactError, match="pickled weights are not read"):
        validate_adapter(tmp_path)


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        ({"A": [3, 5], "B": [3, 2]}, "another rank"),
        ({"B": [3, 2]}, "half of a sum"),
        ({"A": [2, 5], "B": [3, 2], "magnitude": [2, 2]}, "neither lora_A nor lora_B"),
    ],
)
def test_halves_that_make_no_sum_of_the_rank_are_refused(
    shapes: dict[str, list[int]], said: str, tmp_path: Path
) -> None:
    tensors(write_adapter(tmp_path), **{Q.format(half): shape for half, shape in shapes.items()})
    with pytest.raises(ArtifactError, match=said):
        validate_adapter(tmp_path)
