"""Hugging Face folders as they are written and read, of no family's model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nemotron_steps.errors import ArtifactError
from nemotron_steps.models.huggingface import WeightReader, save_hf_checkpoint


def test_the_config_names_the_type_of_most_numbers_not_of_most_tensors(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps({"model_type": "none", "torch_dtype": "float32"}))
    (source / "tokenizer.json").write_text("{}")
    small = {f"norm{i}": torch.ones(2) for i in range(5)}
    large = {"w": torch.ones(100, dtype=torch.bfloat16), "counts": torch.ones(1000, dtype=torch.int64)}
    save_hf_checkpoint(tmp_path / "saved", {**small, **large}.items(), source)
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config == {"model_type": "none", "dtype": "bfloat16"}


def test_a_folder_without_weights_says_what_is_in_it(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no safetensors weights") as refused:
        WeightReader(tmp_path)
    assert refused.value.found == "nothing"
    for number in range(9):
        (tmp_path / f"{number}.bin").write_text("")
    with pytest.raises(ArtifactError) as refused:
        WeightReader(tmp_path)
    assert refused.value.found == ", ".join(f"{number}.bin" for number in range(8))


def test_a_tensor_in_two_files_without_an_index_is_refused(tmp_path):
    for name in ("model.safetensors", "zz_old.safetensors"):
        save_file({"norm.weight": torch.ones(2)}, tmp_path / name)
    with pytest.raises(ArtifactError) as caught:
        WeightReader(tmp_path)
    assert "norm.weight" in str(caught.value) and caught.value.found == "model.safetensors and zz_old.safetensors"
