"""What makes a folder an adapter: PEFT's two files, and two halves of the config's rank for every projection."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.artifacts.validators import validate_adapter
from nemotron_steps.errors import ArtifactError
from tests.artifacts.checkpoint_files import write_adapter

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


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors"])
def test_both_files_are_needed_and_pickled_weights_are_named(missing: str, tmp_path: Path) -> None:
    (write_adapter(tmp_path) / missing).unlink()
    with pytest.raises(ArtifactError, match=f"has no {missing}\n"):
        validate_adapter(tmp_path)
    (tmp_path / "adapter_model.bin").touch()
    with pytest.raises(ArtifactError, match="pickled weights are not read"):
        validate_adapter(tmp_path)


@pytest.mark.parametrize(
    "settings",
    [{"r": 0}, {"r": True}, {"r": 2.0}, {"r": None}, {"lora_alpha": None}, {"lora_alpha": True}, {"lora_alpha": "4"}],
)
def test_a_rank_is_at_least_one_and_a_scale_a_number(settings: dict[str, Any], tmp_path: Path) -> None:
    config = {"r": 1, "lora_alpha": 0.5, "target_modules": "all-linear"}
    tensors(write_adapter(tmp_path), **{Q.format("A"): [1, 5], Q.format("B"): [3, 1]})
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    assert validate_adapter(tmp_path)["rank"] == 1
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, **settings}))
    with pytest.raises(ArtifactError, match="no rank or no scale"):
        validate_adapter(tmp_path)


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        ({"A": [3, 5], "B": [3, 2]}, "another rank"),
        ({"A": [2, 5], "B": [2, 3]}, "another rank"),
        ({"A": [2], "B": [3, 2]}, "another rank"),
        ({"A": [2, 5], "B": [3, 2, 1]}, "another rank"),
        ({"A": [2, 5]}, "half of a sum"),
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
