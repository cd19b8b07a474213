"""A policy as Ray actors without generators, judges or environments: supervised training and DPO."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from nemotron_steps.config.layout.constraints import device_violations, raise_if_violated
from nemotron_steps.config.layout.parallel_config import parallel_config_of
from nemotron_steps.engine.placement.cluster import RayCluster
from nemotron_steps.engine.placement.policy_group import RayPolicy
from nemotron_steps.engine.workers.workers import places

if TYPE_CHECKING:
    from nemotron_steps.config.schema.policy import PolicyConfig
    from nemotron_steps.config.schema.rl import ClusterConfig
    from nemotron_steps.engine.losses.loss import Loss


def place_policy(
    cluster: ClusterConfig,
    config: PolicyConfig,
    checkpoint: Path,
    loss_fn: Loss,
    *,
    reference: bool,
    total_steps: int,
) -> tuple[RayPolicy, ExitStack, dict[str, Any]]:
    """Start and load one rank a device; the policy, what ends it, and where it is. Arguments as build_policy's.

    Raises:
        ConfigError: `cluster.policy_workers` is not the number of GPUs, or the layout does not divide the ranks.
        UnsupportedError, WorkerLostError: see RayCluster and RayPolicy.
    """
    sizes = parallel_config_of(SimpleNamespace(cluster=cluster, policy=config))
    raise_if_violated(sizes, found=[*device_violations(sizes)])
    ranks = sizes.ranks
    gpu = 1.0 if cluster.gpus_per_node else 0.0
    with ExitStack() as resources:
        ray = RayCluster(cluster, workers=ranks)
        resources.callback(ray.close)
        ray.reserve([{"GPU": gpu} if gpu else {}] * ranks)
        policy = RayPolicy([ray.options(rank, gpu) for rank in range(ranks)], local=ray.is_local)
        resources.callback(policy.close)
        policy.build(config, checkpoint, loss_fn, reference=reference, total_steps=total_steps)
        return policy, resources.pop_all(), {"backend": "ray", "workers": places(policy.workers)}
