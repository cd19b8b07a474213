"""What a training step refuses about its placement before it loads a model. Nothing here may import torch.

Not here: how many devices the cluster has (engine).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from nemotron_steps.artifacts.models import Artifact
from nemotron_steps.config.layout.facts import ModelFacts
from nemotron_steps.config.layout.mends import refuse
from nemotron_steps.config.layout.sizes import getter, sizes_of
from nemotron_steps.config.schema.dpo import DpoConfig
from nemotron_steps.config.schema.policy import PolicyConfig
from nemotron_steps.config.schema.rl import ClusterConfig, RlConfig
from nemotron_steps.config.schema.sft import SftConfig
from nemotron_steps.errors import UnsupportedError
from nemotron_steps.models.architecture import facts_of

MODEL_PORTS = ("policy", "model")
"""What the training steps call the port of the model that they train."""


def check(config: SftConfig | DpoConfig, inputs: Mapping[str, Artifact | None]) -> None:
    """Refuse what a step that trains without generating cannot place. See StepTable.preflight."""
    refuse_without_ray(config.cluster, config.policy)
    refuse_misfits(config, inputs)
    refuse_without_gpus(config.cluster)


def refuse_misfits(config: SftConfig | DpoConfig | RlConfig, inputs: Mapping[str, Artifact | None]) -> None:
    """A layout that does not come out even over the model, as far as it is there, the devices and the batch.

    Args:
        inputs: see StepTable.preflight; a model that an earlier step will make is not looked at.

    Raises:
        ConfigError: see config/layout.
        ArtifactError, UnsupportedError: the model's config.json is missing, or not of a model that can be trained.
    """
    folder = config.policy.checkpoint
    made_later = any(port in inputs and inputs[port] is None for port in MODEL_PORTS)
    known = folder is not None and not made_later and Path(folder).is_dir()
    model = facts_of(folder) if known and folder is not None else ModelFacts.from_scratch(getter(config))
    refuse(sizes_of(config), model)


def refuse_without_ray(cluster: ClusterConfig, policy: PolicyConfig, *further: str) -> None:
    """Settings that need more than one process: refused where there is one, never ignored.

    Args:
        further: overrides that would do without what else in the step's config needs another process.

    Raises:
        UnsupportedError: `cluster.backend=process` with such settings; names all of them.
    """
    if cluster.backend != "process":
        return
    without = list(further)
    if (cluster.policy_workers or 1) > 1:
        without.append("cluster.policy_workers=1")
    if cluster.num_nodes > 1:
        without.append("cluster.num_nodes=1")
    if cluster.gpus_per_node > 1:
        without.append("cluster.gpus_per_node=1")
    if cluster.ray_address is not None:
        without.append("cluster.ray_address=null")
    without += [f"{key}=1" for key, size in _parallel_sizes(policy).items() if size > 1]
    if without:
        raise UnsupportedError(
            "several policy ranks, a model split over ranks, separate devices and several nodes need Ray",
            where=", ".join(override.partition("=")[0] for override in without),
            expected="cluster.backend=ray",
            found="cluster.backend=process",
            hints=["cluster.backend=ray", " ".join(without)],
        )


def refuse_without_gpus(cluster: ClusterConfig, devices: Path = Path("/dev")) -> None:
    """GPUs asked of a machine without any: by this process, or by a Ray cluster that would start on it.

    Args:
        devices: the folder of device files.

    Raises:
        UnsupportedError: there is none that could be used. How many there are is asked when Ray starts.
    """
    if cluster.gpus_per_node == 0 or (cluster.backend == "ray" and cluster.ray_address is not None):
        return
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if hidden or not any(True for kind in ("nvidia[0-9]*", "dxg", "kfd") for _ in devices.glob(kind)):
        raise UnsupportedError(
            "the run asks for GPUs and this machine has none",
            where="cluster.gpus_per_node",
            expected="a machine with NVIDIA GPUs, or a Ray cluster of such",
            found=f"cluster.gpus_per_node={cluster.gpus_per_node}"
            + (", all hidden by CUDA_VISIBLE_DEVICES" if hidden else ""),
            hints=[
                "cluster.backend=process cluster.gpus_per_node=0   # one process, on CPU",
                "-c tiny   # for two CPU cores",
                "cluster.ray_address=HOST:6379   # a cluster that has them",
                "steps run ... -r PROFILE   # a profile of env.toml",
            ],
        )


def _parallel_sizes(policy: PolicyConfig) -> dict[str, int]:
    """Over how many ranks the model is split, by key."""
    if policy.dtensor_cfg.enabled:
        return {"policy.dtensor_cfg.tensor_parallel_size": policy.dtensor_cfg.tensor_parallel_size}
    megatron = policy.megatron_cfg
    return {
        "policy.megatron_cfg.tensor_model_parallel_size": megatron.tensor_model_parallel_size,
        "policy.megatron_cfg.pipeline_model_parallel_size": megatron.pipeline_model_parallel_size,
        "policy.megatron_cfg.context_parallel_size": megatron.context_parallel_size,
        "policy.megatron_cfg.expert_model_parallel_size": megatron.expert_model_parallel_size,
    }
