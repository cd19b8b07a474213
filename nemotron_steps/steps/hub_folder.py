"""What a step that reads a Hugging Face folder refuses of its tensors before any step of a run starts.

Looks at config.json and at what files say of their tensors. Nothing here may import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from nemotron_steps.artifacts.checkpoints import read_safetensors_header, safetensors_shards
from nemotron_steps.artifacts.models import Artifact
from nemotron_steps.config.schema.difficulty import DifficultyConfig
from nemotron_steps.config.schema.eval import EvalConfig, StagesEvalConfig
from nemotron_steps.models.architecture import Architecture
from nemotron_steps.models.mapping import Stored, check_stored

_PLAIN = ("F64", "F32", "F16", "BF16")


def check(config: EvalConfig | StagesEvalConfig | DifficultyConfig, inputs: Mapping[str, Artifact | None]) -> None:
    """Refuse folders that a step cannot generate from. See StepTable.preflight."""
    if isinstance(config, StagesEvalConfig):
        models = {f"models.{name}": folder for name, folder in config.models.items()}
    else:
        models = {} if config.model is None else {"model": config.model}
    for port, folder in models.items():
        made_later = port in inputs and inputs[port] is None
        if not made_later and Path(folder).is_dir():
            check_tensors(Path(folder))


def check_tensors(folder: Path) -> None:
    """Refuse a folder whose tensors are not those of its config.json, by the first that is not.

    Raises:
        ArtifactError, UnsupportedError: that, or see Architecture.from_folder.
    """
    architecture = Architecture.from_folder(folder)
    stored = {
        name: Stored(entry["dtype"].lower(), tuple(entry["shape"]), entry["dtype"] in _PLAIN)
        for shard in safetensors_shards(folder)
        for name, entry in read_safetensors_header(shard).items()
    }
    check_stored(stored, architecture, str(folder))
