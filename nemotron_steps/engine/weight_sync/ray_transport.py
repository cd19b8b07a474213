"""Weights as objects in Ray's store: for CPU workers on other machines, and for tensors that are in no policy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from nemotron_steps.engine.weight_sync.plan import WeightPlan


def put_weights(plan: WeightPlan, weights: Iterator[tuple[str, torch.Tensor]]) -> list[Any]:
    """One object reference a bucket."""
    import ray

    references = []
    for bucket in plan.buckets:
        buffer = torch.empty(bucket.bytes, dtype=torch.uint8)
        plan.fill(bucket, buffer, weights)
        references.append(ray.put(buffer.numpy()))
    return references


def get_weights(plan: WeightPlan, references: Sequence[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of `put_weights`, bucket by bucket."""
    import ray

    for bucket, reference in zip(plan.buckets, references, strict=True):
        # Objects are mapped read-only, which torch cannot express; the copy lives for one bucket.
        yield from bucket.views(torch.from_numpy(np.array(ray.get(reference))))


def put_plain(weights: Iterable[tuple[str, torch.Tensor]]) -> tuple[WeightPlan, list[Any]]:
    """Plan and objects of any tensors of this process."""
    kept = [(name, tensor.detach().cpu()) for name, tensor in weights]
    plan = WeightPlan.of(kept)
    return plan, put_weights(plan, iter(kept))
