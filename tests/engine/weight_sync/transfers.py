"""Weights of a policy in an actor, sent to receivers in other actors, and compared.

python3 -m tests.engine.weight_sync.transfers    on a GPU machine: CUDA IPC, and NCCL with a second GPU; JSON with times
"""

import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from benchmarks.grpo_task import make_large_checkpoint
from nemotron_steps.config.schema.grpo import LossFnConfig
from nemotron_steps.config.schema.rl import ClusterConfig
from nemotron_steps.engine.losses.policy_gradient import PolicyGradientLoss
from nemotron_steps.engine.placement.cluster import RayCluster
from nemotron_steps.engine.placement.policy_group import RayPolicy
from nemotron_steps.engine.weight_sync import transfer as transfer_module
from nemotron_steps.engine.workers.workers import Worker, result_of, start_workers, stop_workers
from tests.engine.placement.kept_weights import SETTINGS, KeptWeights
from tests.engine.policy.batches import grouped_batch, policy_config


def transfer(
    folder: Path, gpus: int, *, layers: int = 28, hidden: int = 1024, receivers: int = 1, forced: Sequence[str] = ("",)
) -> list[dict]:
    """Train, send to receivers, and compare what arrived; with one GPU both sides share it.

    Args:
        layers, hidden: 28 layers of 1024 are 0.9 GB in bfloat16: four buckets.
        forced: transports to use one after another, "" for the one that devices and machines ask for.
    """
    make_large_checkpoint(folder, layers=layers, hidden=hidden)
    cluster = RayCluster(ClusterConfig(backend="ray", gpus_per_node=gpus))
    try:
        cluster.reserve([{"GPU": 1.0} if gpus else {}] * max(1, gpus))
        share = {0: 0.0, 1: 0.5}.get(gpus, 1.0)
        policy = RayPolicy([cluster.options(0, share)], local=cluster.is_local)
        config = policy_config(precision="bfloat16")
        loss_fn = PolicyGradientLoss(LossFnConfig(force_on_policy_ratio=True))
        policy.build(config, folder, loss_fn, reference=False, total_steps=9)
        names = [f"generator {number}" for number in range(receivers)]
        options = [cluster.options(max(0, gpus - 1), share)] * receivers
        workers = start_workers(KeptWeights, names, options, [SETTINGS])
        results = [_updates(policy, workers, transport) for transport in forced]
        stop_workers([*workers, *policy.workers])
        return results
    finally:
        cluster.close()


def _updates(policy: RayPolicy, workers: list[Worker], transport: str) -> dict:
    chosen = (
        transfer_module.choose_transports if not transport else lambda _, receivers: [(transport, 0)] * len(receivers)
    )
    with mock.patch.object(transfer_module, "choose_transports", chosen):
        transports = policy.transfer_to(workers)
    seconds, equal, moved = [], True, 0
    for version in range(3):
        policy.train_step(grouped_batch(version))
        started = time.perf_counter()
        moved = transports.update(version)
        seconds.append(time.perf_counter() - started)
        if version == 1:
            continue  # not looked at: the next one must be right all the same
        sent = {name: tensor.float().numpy() for name, tensor in policy.weights()}
        for worker in workers:
            kept = result_of(worker.call("kept"), worker)
            equal = equal and kept.keys() == sent.keys() and all(np.array_equal(kept[n], sent[n]) for n in sent)
    devices = result_of(workers[0].call("device_of_kept"), workers[0])
    return {
        "transports": transports.transports,
        "equal": equal,
        "seconds": seconds,
        "bytes": moved,
        "devices": sorted(devices),
    }


def main() -> None:
    """Every transport that this machine's GPUs offer."""
    for gpus in range(1, min(2, torch.cuda.device_count()) + 1):
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(transfer(Path(folder), gpus)[0]), flush=True)


if __name__ == "__main__":
    main()
