"""What a step that reads a Hugging Face folder refuses of its tensors before any step of a run starts.

Looks at config.json and at what files say of their tensors. Nothing here may import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from nemotron_steps.artifacts.checkpoints import read_safetensors_header, safetensors_shards
from nemotron_steps.artifacts.models import Artifact
from nemotron_steps.config.families import FAMILIES
from nemotron_steps.config.schema.difficulty import DifficultyConfig
from nemotron_steps.config.schema.eval import EvalConfig, StagesEvalConfig
from nemotron_steps.config.schema.rl import JUDGE_ROLES, NemoGymConfig
from nemotron_steps.errors import UnsupportedError
from nemotron_steps.models.architecture import Architecture, hf_folder, read_config
from nemotron_steps.models.huggingface import in_two_files
from nemotron_steps.models.mapping import Stored, check_stored

_PLAIN = ("F64", "F32", "F16", "BF16")
_JUDGE_PORTS = {"genrm_model": "reward_model"}
"""Judge → the input that brings it; of the others only the config knows."""


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
    check_judges(config.env.nemo_gym, inputs)


def check_judges(gym: NemoGymConfig, inputs: Mapping[str, Artifact | None]) -> None:
    """Refuse folders that a step's judges cannot generate from; those that are here, and that no earlier step makes.

    Args:
        inputs: see StepTable.preflight.
    """
    for role in JUDGE_ROLES:
        judge = gym.judge(role)
        if judge is None or judge.backend == "http" or judge.model is None:
            continue
        port = _JUDGE_PORTS.get(role, "")
        made_later = port in inputs and inputs[port] is None
        if not made_later and Path(judge.model).is_dir():
            (check_known_tensors if judge.backend == "vllm" else check_tensors)(Path(judge.model))


def check_tensors(folder: Path) -> None:
    """Refuse a folder whose tensors are not those of its config.json, by the first that is not.

    Raises:
        ArtifactError, UnsupportedError: that, or see Architecture.from_folder.
    """
    _check(folder, Architecture.from_folder(folder))


def check_known_tensors(folder: Path) -> None:
    """`check_tensors` of a folder that a library reads, which knows more models than this package: families,
    attention and quantisations that have no Architecture are left to it, and so are Megatron checkpoints.

    Raises:
        ArtifactError, UnsupportedError: see check_tensors.
    """
    if hf_folder(folder) != folder or str(read_config(folder / "config.json").get("model_type")) not in FAMILIES:
        return
    try:
        architecture = Architecture.from_folder(folder)
    except UnsupportedError:
        return
    _check(folder, architecture)


def _check(folder: Path, architecture: Architecture) -> None:
    stored: dict[str, Stored] = {}
    file_of: dict[str, str] = {}
    for shard in safetensors_shards(folder):
        for name, entry in read_safetensors_header(shard).items():
            if name in file_of:
                raise in_two_files(name, folder, file_of[name], shard.name)
            file_of[name] = shard.name
            stored[name] = Stored(entry["dtype"].lower(), tuple(entry["shape"]), entry["dtype"] in _PLAIN)
    check_stored(stored, architecture, str(folder))
