"""Two forked ranks that reduce the metrics of half a batch each: `reduce_metrics.py FOLDER`.

A process of its own, because a test process may already hold a process group.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist
import torch.multiprocessing as mp

from nemotron_steps.config.schema.grpo import LossFnConfig
from nemotron_steps.engine.losses.loss import all_reduce_metric_sums, count_normalizers, finalize_metrics
from nemotron_steps.engine.losses.policy_gradient import PolicyGradientLoss
from tests.engine.engine_samples import random_batch, rows_of

RANKS = 2


def reduce(rank: int, folder: str) -> None:
    """One rank: its rows' sums, reduced, into FOLDER/RANK.json."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    batch, lp = random_batch(rows=6, seed=2)
    normalizers = count_normalizers(batch)
    rows = [row for row in range(6) if row % RANKS == rank]
    loss_fn = PolicyGradientLoss(LossFnConfig(reference_policy_kl_penalty=0.1))
    _, sums = loss_fn(lp[rows], rows_of(batch, rows), normalizers)
    metrics = finalize_metrics(all_reduce_metric_sums(sums), normalizers)
    Path(folder, f"{rank}.json").write_text(json.dumps(metrics))
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.start_processes(reduce, args=(sys.argv[1],), nprocs=RANKS, start_method="fork")
