"""What a step that reads a Hugging Face folder refuses of its tensors before any step of a run starts.

Looks at config.json and at what files say of their tensors. Nothing here may import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from nemotron_steps.artifacts.checkpoints import read_safetensors_header, safetensors_shards
from nemotron_steps.artifacts.models import Artifact
from nemotron_steps.config.families import FAMILIES
from nemotron_steps.config.layout.model_limits import limit_violations
from nemotron_steps.config.layout.model_spec import ModelSpec
from nemotron_steps.config.layout.other_models import raise_if_vllm_violates, vllm_keys
from nemotron_steps.config.layout.parallel_config import JUDGES, getter
from nemotron_steps.config.schema.base import Section
from nemotron_steps.config.schema.convert import ConvertConfig, MergeConfig
from nemotron_steps.config.schema.eval import DifficultyConfig, EvalConfig, StagesEvalConfig
from nemotron_steps.config.schema.rl import JUDGE_ROLES, RlConfig
from nemotron_steps.errors import ConfigError, UnsupportedError
from nemotron_steps.models.adapters import recorded_base
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
    known: dict[str, ModelSpec] = {}
    for port, folder in models.items():
        made_later = port in inputs and inputs[port] is None
        if not made_later and Path(folder).is_dir():
            known[port] = check_tensors(Path(folder)).facts
    _refuse_of_vllm(known, config)
    check_judges(config, inputs)


def check_judges(
    config: EvalConfig | StagesEvalConfig | DifficultyConfig | RlConfig, inputs: Mapping[str, Artifact | None]
) -> None:
    """Refuse folders that a step's judges cannot generate from; those that are here, and that no earlier step makes.

    Args:
        inputs: see StepTable.preflight.
    """
    known: dict[str, ModelSpec] = {}
    for role in JUDGE_ROLES:
        judge = config.env.nemo_gym.judge(role)
        if judge is None or judge.backend == "http" or judge.model is None:
            continue
        port = _JUDGE_PORTS.get(role, "")
        made_later = port in inputs and inputs[port] is None
        if not made_later and Path(judge.model).is_dir():
            check_judge = check_known_tensors if judge.backend == "vllm" else check_tensors
            architecture = check_judge(Path(judge.model))
            if architecture is not None:
                known[f"{JUDGES}.{role}.responses_api_models.vllm_model.model"] = architecture.facts
    _refuse_of_vllm(known, config)


def _refuse_of_vllm(models: Mapping[str, ModelSpec], config: Section) -> None:
    """ConfigError for what vLLM would refuse of models that no plan could look at: cuts, and lengths."""
    get = getter(config)
    raise_if_vllm_violates(models, get)
    for model_key, model in models.items():
        for each in limit_violations(model_key, model_key, model, get) if vllm_keys(model_key, get) is not None else ():
            raise ConfigError(each.what, where=each.key, expected=each.expected, found=each.found, hints=each.hints)


def check_tensors(folder: Path) -> Architecture:
    """Refuse a folder whose tensors are not those of its config.json, by the first that is not.

    Raises:
        ArtifactError, UnsupportedError: that, or see Architecture.from_folder.
    """
    return _checked(folder, Architecture.from_folder(folder))


def check_known_tensors(folder: Path) -> Architecture | None:
    """`check_tensors` of a folder that a library reads, which knows more models than this package: families,
    attention and quantisations that have no Architecture (None) are left to it, and so are Megatron checkpoints.

    Raises:
        ArtifactError, UnsupportedError: see check_tensors.
    """
    if hf_folder(folder) != folder or str(read_config(folder / "config.json").get("model_type")) not in FAMILIES:
        return None
    try:
        architecture = Architecture.from_folder(folder)
    except UnsupportedError:
        return None
    return _checked(folder, architecture)


def _checked(folder: Path, architecture: Architecture) -> Architecture:
    stored: dict[str, Stored] = {}
    file_of: dict[str, str] = {}
    for shard in safetensors_shards(folder):
        for name, entry in read_safetensors_header(shard).items():
            if name in file_of:
                raise in_two_files(name, folder, file_of[name], shard.name)
            file_of[name] = shard.name
            stored[name] = Stored(entry["dtype"].lower(), tuple(entry["shape"]), entry["dtype"] in _PLAIN)
    check_stored(stored, architecture, str(folder))
    return architecture


def check_converted(config: ConvertConfig, inputs: Mapping[str, Artifact | None]) -> None:
    """Refuse a Hugging Face folder that cannot be converted. See StepTable.preflight."""
    for source in inputs.values():
        if source is not None:
            check_tensors(source.path)


def check_base(config: MergeConfig, inputs: Mapping[str, Artifact | None]) -> None:
    """Refuse a Hugging Face folder that an adapter cannot be added to: the one that is given, else the one that the
    adapter names. See StepTable.preflight."""
    adapter, base = inputs.get("adapter"), config.base
    if base is None and adapter is not None:
        base = recorded_base(adapter.path)
    made_later = "base" in inputs and inputs["base"] is None
    if base is not None and not made_later and Path(base).is_dir():
        check_known_tensors(Path(base))
