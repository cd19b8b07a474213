"""HF ↔ Megatron weight conversion: exact round trips, and the tokenizer travels along."""

import json
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch

from nemotron_steps.artifacts.validators import validate
from nemotron_steps.config.schema.convert import ConvertConfig
from nemotron_steps.errors import ArtifactError
from nemotron_steps.models import huggingface
from nemotron_steps.models.architecture import Architecture
from nemotron_steps.models.distributed_checkpoint import read_metadata
from nemotron_steps.models.huggingface import WeightReader, load_hf_weights, save_hf_checkpoint
from nemotron_steps.models.mapping import (
    EXACT,
    hf_shapes,
    parameters,
    to_megatron,
)
from nemotron_steps.models.megatron_checkpoint import (
    convert_hf_to_megatron,
    convert_megatron_to_hf,
    save_megatron_weights,
)
from nemotron_steps.runs.context import plain_context
from nemotron_steps.steps.convert import hf_to_megatron, megatron_to_hf
from tests.models.checkpoints import write_checkpoint
from tests.models.hybrid_twins import write_hybrid


def test_round_trip_through_folders_is_bit_exact(checkpoint, tmp_path):
    convert_hf_to_megatron(checkpoint, tmp_path / "megatron")
    convert_megatron_to_hf(tmp_path / "megatron", tmp_path / "back")
    before, after = load_hf_weights(checkpoint), load_hf_weights(tmp_path / "back")
    assert set(before) == set(after)
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]) and tensor.dtype == after[name].dtype, name
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "back" / name).read_bytes() == (checkpoint / name).read_bytes()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused_by_name(checkpoint, tmp_path, value):
    convert_hf_to_megatron(checkpoint, tmp_path / "whole")
    weights = load_hf_weights(checkpoint)
    name = sorted(hf_shapes(Architecture.from_folder(checkpoint)))[-1]
    weights[name].view(-1)[3] = value
    save_hf_checkpoint(tmp_path / "broken", weights.items(), checkpoint)
    with pytest.raises(ArtifactError, match=re.escape(name)) as caught:
        convert_hf_to_megatron(tmp_path / "broken", tmp_path / "megatron")
    assert caught.value.found == f"1 of {weights[name].numel()} are not"
    architecture = Architecture.from_folder(checkpoint)
    save_megatron_weights(to_megatron(weights, architecture), architecture, tmp_path / "mega/weights")
    shutil.copytree(tmp_path / "whole/hf", tmp_path / "mega/hf")
    with pytest.raises(ArtifactError, match=re.escape(name)):
        convert_megatron_to_hf(tmp_path / "mega", tmp_path / "back")


def test_an_export_fills_a_shard_before_it_begins_another_and_is_read_back_whole(tmp_path, monkeypatch):
    write_checkpoint("qwen3", tmp_path / "source")
    monkeypatch.setattr(huggingface, "MAX_SHARD_BYTES", 100)
    weights = {f"w{i}": torch.full((10,), float(i)) for i in range(6)}  # of 40 bytes each
    save_hf_checkpoint(tmp_path / "export", weights.items(), tmp_path / "source")
    index = json.loads((tmp_path / "export" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 240
    assert index["weight_map"] == {f"w{i}": f"model-{i // 2 + 1:05d}-of-00003.safetensors" for i in range(6)}
    saved = load_hf_weights(tmp_path / "export")
    assert saved.keys() == weights.keys() and all(torch.equal(saved[name], weights[name]) for name in weights)
    assert len({path.stat().st_mode for path in (tmp_path / "export").iterdir()}) == 1  # that of any new file


def test_an_index_that_points_out_of_the_folder_is_refused(checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "model")
    (tmp_path / "model/model.safetensors").rename(tmp_path / "outside.safetensors")
    for shard_name in ("../outside.safetensors", "a/../../outside.safetensors", str(tmp_path / "outside.safetensors")):
        index = {"weight_map": dict.fromkeys(load_hf_weights(checkpoint), shard_name)}
        (tmp_path / "model/model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ArtifactError, match="outside its folder") as caught:
            load_hf_weights(tmp_path / "model")
        assert caught.value.found == shard_name
        with pytest.raises(ArtifactError, match="leaves its folder"):
            validate("checkpoint_hf", tmp_path / "model")


def test_megatron_metadata_that_points_out_of_the_folder_is_refused(checkpoint, tmp_path):
    convert_hf_to_megatron(checkpoint, tmp_path / "megatron")
    weights = tmp_path / "megatron/weights"
    metadata = read_metadata(weights)
    for stored in metadata.storage_data.values():
        stored.relative_path = f"../{stored.relative_path}"
    (weights / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ArtifactError, match="outside its folder"):
        convert_megatron_to_hf(tmp_path / "megatron", tmp_path / "back")


class Noting(WeightReader):
    """Notes the names of what is read."""

    def __init__(self, folder):
        super().__init__(folder)
        self.read = []

    def __call__(self, name):
        self.read.append(name)
        return super().__call__(name)


def test_what_a_rank_does_not_hold_is_not_read_and_still_looked_for(checkpoint):
    architecture, reader = Architecture.from_folder(checkpoint), Noting(checkpoint)
    last = list(parameters(architecture))[-1]
    ((parameter, _),) = to_megatron(reader, architecture, held={last.name})
    assert parameter.name == last.name and reader.read == list(last.hf_names)
    weights = load_hf_weights(checkpoint)
    others = (name for p in parameters(architecture) if not p.optional for name in p.hf_names)
    other = next(name for name in others if name not in reader.read)
    del weights[other]
    with pytest.raises(ArtifactError, match=re.escape(other)):
        next(to_megatron(weights, architecture, held={last.name}))


def test_of_experts_only_those_asked_for_are_converted(tmp_path):
    write_checkpoint("qwen3_moe", tmp_path / "moe")
    architecture, weights = Architecture.from_folder(tmp_path / "moe"), load_hf_weights(tmp_path / "moe")
    half = slice(architecture.num_experts // 2, architecture.num_experts)
    parts = dict(to_megatron(weights, architecture, experts=half))
    assert any(parameter.of_experts for parameter in parts)
    for parameter, whole in to_megatron(weights, architecture):
        assert torch.equal(parts[parameter], whole[half] if parameter.of_experts else whole)


def test_a_checkpoint_that_would_run_code_is_refused(tmp_path):
    import pickle

    write_checkpoint("qwen3", tmp_path / "hf")
    convert_hf_to_megatron(tmp_path / "hf", tmp_path / "megatron")
    marker = tmp_path / "executed"

    class Attack:
        def __reduce__(self):
            return (open, (str(marker), "w"))

    (tmp_path / "megatron" / "weights" / ".metadata").write_bytes(pickle.dumps(Attack()))
    with pytest.raises(ArtifactError, match="metadata"):
        convert_megatron_to_hf(tmp_path / "megatron", tmp_path / "back")
    assert not marker.exists()


def test_a_folder_without_weights_says_what_is_in_it(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no safetensors weights") as refused:
        WeightReader(tmp_path)
    assert refused.value.found == "nothing"


def converted(step, model, place, precision="keep"):
    outputs = {"checkpoint": "checkpoint_" + step.__name__.rpartition("_to_")[2]}
    context = plain_context(ConvertConfig(precision=precision), place, inputs={"model": model}, outputs=outputs)
    step(context)
    return context.outputs["checkpoint"].path


def test_greedy_text_is_the_same_after_both_conversions(checkpoint, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    back = converted(megatron_to_hf, converted(hf_to_megatron, checkpoint, tmp_path / "1"), tmp_path / "2")
    texts = []
    for folder in (checkpoint, back):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        chat = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], return_tensors="pt")
        out = model.generate(**chat, max_new_tokens=12, do_sample=False, pad_token_id=0)
        texts.append(tokenizer.decode(out[0]))
    assert texts[0] == texts[1] and len(texts[0]) > 12


@pytest.mark.parametrize(("there", "back"), [("bfloat16", "keep"), ("keep", "bfloat16"), ("bfloat16", "float32")])
def test_weights_are_written_in_the_precision_that_is_asked_for(there, back, tmp_path):
    """Prediction tensors with them, and the exact ones in float32 always."""
    write_hybrid("mtp", tmp_path / "hub")
    megatron = converted(hf_to_megatron, tmp_path / "hub", tmp_path / "1", there)
    folder = converted(megatron_to_hf, megatron, tmp_path / "2", back)
    before, after = load_hf_weights(tmp_path / "hub"), load_hf_weights(folder)
    assert before.keys() == after.keys()
    dtype = torch.float32 if back == "float32" else torch.bfloat16
    for name, tensor in before.items():
        exact = name.endswith(EXACT)
        assert after[name].dtype == (torch.float32 if exact else dtype), name
        assert torch.equal(after[name], tensor if exact else tensor.bfloat16().to(dtype)), name
    assert json.loads((folder / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
