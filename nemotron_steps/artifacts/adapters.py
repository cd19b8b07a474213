"""Checks of adapter folders without torch: PEFT's config, and an A and a B of the same rank for every projection."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from nemotron_steps.artifacts.checkpoints import listing, read_json_object, read_safetensors_header
from nemotron_steps.errors import ArtifactError

CONFIG, WEIGHTS, BASE = "adapter_config.json", "adapter_model.safetensors", "base.json"


def validate_adapter(folder: Path) -> dict[str, Any]:
    """adapter: adapter_config.json and adapter_model.safetensors. Returns attributes."""
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            pickled = " (pickled weights are not read)" if (folder / "adapter_model.bin").is_file() else ""
            raise ArtifactError(
                f"the adapter has no {name}{pickled}",
                where=str(folder),
                expected=f"{CONFIG} and {WEIGHTS}, as PEFT's save_pretrained writes them",
                found=listing(folder),
            )
    settings = read_json_object(folder / CONFIG)
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    if type(rank) is not int or rank < 1 or type(alpha) not in (int, float):
        raise ArtifactError(
            "the adapter's config has no rank or no scale",
            where=str(folder / CONFIG),
            expected="r: a positive integer, lora_alpha: a number",
            found=f"r: {rank}, lora_alpha: {alpha}",
        )
    tensors = read_safetensors_header(folder / WEIGHTS)
    for name, entry in tensors.items():
        _check_half(folder, name, entry["shape"], rank, tensors)
    found: dict[str, Any] = {
        "rank": rank,
        "alpha": alpha,
        "target_modules": settings.get("target_modules"),
        "parameters": sum(math.prod(entry["shape"]) for entry in tensors.values()),
        "dtype": "+".join(sorted({entry["dtype"] for entry in tensors.values()})).lower(),
    }
    if (folder / BASE).is_file():
        digest = read_json_object(folder / BASE).get("digest")
        found |= {"base": digest} if digest else {}
    return found


def _check_half(folder: Path, name: str, shape: list[int], rank: int, tensors: dict[str, dict[str, Any]]) -> None:
    for letter, other, dimension in (("A", "B", 0), ("B", "A", 1)):
        if not name.endswith(f".lora_{letter}.weight"):
            continue
        if len(shape) != 2 or shape[dimension] != rank:
            raise ArtifactError(
                f"'{name}' has another rank than the config says",
                where=str(folder / WEIGHTS),
                expected=str(rank),
                found=f"shape {shape}",
            )
        if name.replace(f".lora_{letter}.", f".lora_{other}.") not in tensors:
            raise ArtifactError(
                f"'{name}' is half of a sum", where=str(folder / WEIGHTS), expected=f"lora_{other} beside it"
            )
        return
    raise ArtifactError(
        "the adapter has a tensor that is neither lora_A nor lora_B",
        where=str(folder / WEIGHTS),
        expected="a plain LoRA adapter",
        found=name,
        hints=("merge it with PEFT's merge_and_unload, and use the checkpoint",),
    )
