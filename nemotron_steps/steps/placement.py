"""What a training step refuses about its placement before it loads a model. Nothing here may import torch.

Not here: whether batches and layouts divide the devices (resolver/checks.py), and what the cluster has (engine).
"""

from __future__ import annotations

from collections.abc import Mapping

from nemotron_steps.artifacts.models import Artifact
from nemotron_steps.config.schema.dpo import DpoConfig
from nemotron_steps.config.schema.policy import PolicyConfig
from nemotron_steps.config.schema.rl import ClusterConfig
from nemotron_steps.config.schema.sft import SftConfig
from nemotron_steps.errors import UnsupportedError


def check(config: SftConfig | DpoConfig, inputs: Mapping[str, Artifact | None]) -> None:
    """Refuse what a step that trains without generating cannot place. See StepTable.preflight."""
    refuse_without_ray(config.cluster, config.policy)


def refuse_without_ray(
    cluster: ClusterConfig, policy: PolicyConfig, further: Mapping[str, bool] | None = None, *, hint: str | None = None
) -> None:
    """Settings that need more than one process: refused where there is one, never ignored.

    Args:
        further: keys of one step's own, and whether they ask for another process.
        hint: an override that does without the further ones.

    Raises:
        UnsupportedError: `cluster.backend=process` with such settings; names all of them.
    """
    if cluster.backend != "process":
        return
    sizes = _parallel_sizes(policy)
    needing = {
        **(further or {}),
        "cluster.policy_workers": (cluster.policy_workers or 1) > 1,
        "cluster.num_nodes": cluster.num_nodes > 1,
        "cluster.gpus_per_node": cluster.gpus_per_node > 1,
        "cluster.ray_address": cluster.ray_address is not None,
        **{key: size > 1 for key, size in sizes.items()},
    }
    asked = [key for key, wanted in needing.items() if wanted]
    if asked:
        raise UnsupportedError(
            "several policy ranks, a model split over ranks, separate devices and several nodes need Ray",
            where=", ".join(asked),
            expected="cluster.backend=ray",
            found="cluster.backend=process",
            hints=["cluster.backend=ray", *([hint] if hint else []), *(f"{key}=1" for key in asked if key in sizes)],
        )


def _parallel_sizes(policy: PolicyConfig) -> dict[str, int]:
    """Over how many ranks the model is split, by key."""
    if policy.dtensor_cfg.enabled:
        return {"policy.dtensor_cfg.tensor_parallel_size": policy.dtensor_cfg.tensor_parallel_size}
    names = (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
    )
    return {f"policy.megatron_cfg.{name}": getattr(policy.megatron_cfg, name) for name in names}
