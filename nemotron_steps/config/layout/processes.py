"""Settings that need more than one process: refused where there is one, never ignored."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from nemotron_steps.config.layout.parallel_config import JUDGE_ROLES
from nemotron_steps.config.schema.opd import OpdConfig
from nemotron_steps.errors import UnsupportedError

if TYPE_CHECKING:
    from nemotron_steps.config.schema.policy import PolicyConfig
    from nemotron_steps.config.schema.rl import ClusterConfig, RlConfig


def cluster_address(config: ClusterConfig) -> str | None:
    """The cluster to join: `cluster.ray_address`, else RAY_ADDRESS, which the ray and slurm executors set for a job;
    None to start one on this machine."""
    return config.ray_address or os.environ.get("RAY_ADDRESS") or None


def raise_if_rl_needs_ray(config: RlConfig) -> None:
    """As `raise_if_ray_needed`, of a step that generates and asks judges as well."""
    further = [] if config.policy.generation.colocated.enabled else ["policy.generation.colocated.enabled=true"]
    if isinstance(config, OpdConfig) and config.on_policy_distillation.non_colocated_teachers.enabled:
        further.append("on_policy_distillation.non_colocated_teachers.enabled=false")
    for role in JUDGE_ROLES:
        judge = config.env.nemo_gym.judge(role)
        if judge is not None and (judge.replicas or 1) > 1:
            further.append(f"env.nemo_gym.{role}.responses_api_models.vllm_model.replicas=1")
    raise_if_ray_needed(config.cluster, config.policy, *further)


def raise_if_ray_needed(cluster: ClusterConfig, policy: PolicyConfig, *further: str) -> None:
    """Refuse `cluster.backend=process` with settings that one process cannot follow.

    Args:
        further: overrides that would do without what else in the step's config needs another process.

    Raises:
        UnsupportedError: names all of them.
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
