"""What a conversion refuses before any step of a run starts: a folder whose parts are not of one model.

Looks at config.json and at what files say of their tensors. Nothing here may import torch.
"""

from __future__ import annotations

from collections.abc import Mapping

from nemotron_steps.artifacts.checkpoints import read_safetensors_header, safetensors_shards
from nemotron_steps.artifacts.models import Artifact
from nemotron_steps.config.schema.convert import ConvertConfig
from nemotron_steps.models.architecture import Architecture
from nemotron_steps.models.mapping import Stored, check_stored

_PLAIN = ("F64", "F32", "F16", "BF16")


def check(config: ConvertConfig, inputs: Mapping[str, Artifact | None]) -> None:
    """Refuse a Hugging Face folder that cannot be converted. See StepTable.preflight."""
    for source in inputs.values():
        if source is not None:
            architecture = Architecture.from_folder(source.path)
            stored = {
                name: Stored(entry["dtype"].lower(), tuple(entry["shape"]), entry["dtype"] in _PLAIN)
                for shard in safetensors_shards(source.path)
                for name, entry in read_safetensors_header(shard).items()
            }
            check_stored(stored, architecture, str(source.path))
