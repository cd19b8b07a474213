"""Settings that need more than one process: refused where there is one, never ignored."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from nemotron_steps.config.layout.parallel_config import DTENSOR, JUDGE_ROLES, KEYS, JudgeLayout, getter
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
            further.append(f"{JudgeLayout(role).section}.replicas=1")
    raise_if_ray_needed(config.cluster, config.policy, *further)


def raise_if_ray_needed(cluster: ClusterConfig, policy: PolicyConfig, *further: str) -> None:
    """UnsupportedError for `cluster.backend=process` with settings that one process cannot follow.

    Args:
        further: overrides that would do without what else in the step's config needs another process.
    """
    if cluster.backend != "process":
        return
    get = getter({"cluster": cluster, "policy": policy})
    ones = ["cluster.policy_workers", "cluster.num_nodes", "cluster.gpus_per_node"]
    if policy.dtensor_cfg.enabled:
        ones.append(f"{DTENSOR}.tensor_parallel_size")
    else:
        ones += [KEYS[cut] for cut in ("tensor", "pipeline", "context", "expert")]
    without = [*further, *(f"{key}=1" for key in ones if (get(key) or 1) > 1)]
    if cluster.ray_address is not None:
        without.append("cluster.ray_address=null")
    if without:
        raise UnsupportedError(
            "several policy ranks, a model split over ranks, separate devices and several nodes need Ray",
            where=", ".join(override.partition("=")[0] for override in without),
            expected="cluster.backend=ray",
            found="cluster.backend=process",
            hints=["cluster.backend=ray", " ".join(without)],
        )
