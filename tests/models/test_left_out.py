"""No tensor is left out of a model, or made up, that is not what the model makes of the others: by any reader."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemotron_steps.engine.policy.hf_model import load_hf_model
from nemotron_steps.engine.policy.megatron import MegatronPolicy
from nemotron_steps.errors import ArtifactError
from nemotron_steps.models.huggingface import WeightReader
from nemotron_steps.models.megatron_checkpoint import (
    convert_hf_to_megatron,
    convert_megatron_to_hf,
)
from nemotron_steps.steps.preflight import check_tensors
from tests.engine.policy.batches import policy_config, rl_loss
from tests.models.checkpoints import write_checkpoint

HEAD, WORDS, ANGLES = "lm_head.weight", "model.embed_tokens.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"
_TWO = "tie_word_embeddings: true, but lm_head.weight and model.embed_tokens.weight differ"


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str | None]] = {
    "tied, and the same again": ({HEAD: lambda w: w[WORDS].clone()}, {}, None),
    "tied, and another": ({HEAD: lambda w: w[WORDS] + 1e-3}, {}, _TWO),
    "not tied, and another": ({HEAD: lambda w: w[WORDS] + 1e-3}, {"tie_word_embeddings": False}, None),
    "not tied, and none": ({}, {"tie_word_embeddings": False}, "lacks the tensor lm_head.weight"),
    "frequencies": ({ANGLES: lambda w: torch.ones(16)}, {}, None),
    "a tensor too many": ({"score.weight": lambda w: w[WORDS][:1].clone()}, {}, "no place for: score.weight"),
    "a tensor too few": ({"model.norm.weight": None}, {}, "lacks the tensor model.norm.weight"),
}


@pytest.mark.parametrize("case", CASES)
def test_every_reader_takes_the_model_whole_or_refuses_it(case: str, tmp_path: Path) -> None:
    changes, config, refusal = CASES[case]
    source = tmp_path / "in"
    write_checkpoint("qwen3_tied", source)
    weights = load_file(source / "model.safetensors")
    for name, made in changes.items():
        if made is None:
            del weights[name]
        else:
            weights[name] = made(weights)
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    stated = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**stated, **config}))
    readers = (
        lambda: convert_hf_to_megatron(source, tmp_path / "megatron"),
        lambda: MegatronPolicy(policy_config(), source, rl_loss()),
        lambda: load_hf_model(source, activation_checkpointing=False),
    )
    for read in readers:
        if refusal is None:
            read()
            continue
        with pytest.raises(ArtifactError, match=refusal):
            read()
    if refusal is None:
        convert_megatron_to_hf(tmp_path / "megatron", tmp_path / "out")
        before, after = (load_hf_model(each, activation_checkpointing=False) for each in (source, tmp_path / "out"))
        ids = torch.arange(3, 20)[None]
        torch.testing.assert_close(after(ids).logits, before(ids).logits, atol=0, rtol=0)


@pytest.mark.parametrize("read", [WeightReader, check_tensors])
def test_a_tensor_in_two_files_is_refused_with_both(read: Callable[[Path], object], tmp_path: Path) -> None:
    write_checkpoint("qwen3_tied", tmp_path)
    weights = (tmp_path / "model.safetensors").rename(tmp_path / "one.safetensors")
    shutil.copyfile(weights, tmp_path / "other.safetensors")
    with pytest.raises(ArtifactError, match="two weights files have the tensor") as caught:
        read(tmp_path)
    assert caught.value.found == "one.safetensors and other.safetensors"
