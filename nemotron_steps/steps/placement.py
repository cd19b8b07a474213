"""What a training step refuses about its placement before it loads a model. Nothing here may import torch.

Not here: how many devices the cluster has (engine).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from nemotron_steps.artifacts.models import Artifact
from nemotron_steps.config.layout.constraints import raise_if_violated
from nemotron_steps.config.layout.model_spec import ModelSpec
from nemotron_steps.config.layout.parallel_config import getter, parallel_config_of
from nemotron_steps.config.layout.processes import raise_if_ray_needed
from nemotron_steps.config.schema.dpo import DpoConfig
from nemotron_steps.config.schema.rl import RlConfig
from nemotron_steps.config.schema.sft import SftConfig
from nemotron_steps.models.adapters import adapter_pairs, lora_candidates, lora_modules
from nemotron_steps.models.architecture import Architecture, facts_of, hf_folder
from nemotron_steps.steps.hub_folder import check_tensors

MODEL_PORTS = ("policy", "model")
"""What the training steps call the port of the model that they train."""


def check(config: SftConfig | DpoConfig, inputs: Mapping[str, Artifact | None]) -> None:
    """Refuse what a step that trains without generating cannot place. See StepTable.preflight."""
    raise_if_ray_needed(config.cluster, config.policy)
    refuse_violations(config, inputs)


def refuse_violations(config: SftConfig | DpoConfig | RlConfig, inputs: Mapping[str, Artifact | None]) -> None:
    """A layout that does not come out even over the model, as far as it is there, the devices and the batch.

    Args:
        inputs: see StepTable.preflight; a model that an earlier step will make is not looked at.

    Raises:
        ConfigError: see config/layout; or an adapter is asked of a linear layer that cannot have one.
        ArtifactError, UnsupportedError: the model's config.json is missing, or not of a model that can be trained; or
            tensors of a Hugging Face folder are not those of its config.json, see steps/hub_folder.
    """
    folder = config.policy.checkpoint
    made_later = any(port in inputs and inputs[port] is None for port in MODEL_PORTS)
    known = folder is not None and not made_later and Path(folder).is_dir()
    model = facts_of(folder) if known and folder is not None else ModelSpec.from_scratch(getter(config))
    raise_if_violated(parallel_config_of(config), model)
    reads_hub = config.policy.dtensor_cfg.enabled and model is not None
    if reads_hub and known and folder is not None and hf_folder(folder) == Path(folder):
        check_tensors(Path(folder))
    peft = config.policy.megatron_cfg.peft
    if peft.enabled and known and folder is not None:
        adapter_pairs(Architecture.from_folder(folder), peft, key="policy.megatron_cfg.peft")
    lora = config.policy.dtensor_cfg.lora_cfg
    if lora.enabled and known and folder is not None:
        lora_modules(lora_candidates(Architecture.from_folder(folder)), lora)
