"""A policy that trains without a generator (SFT, DPO), where `cluster` puts it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nemotron_steps.config.schema.policy import PolicyConfig
from nemotron_steps.config.schema.rl import ClusterConfig
from nemotron_steps.engine.backends.policy import build_policy
from nemotron_steps.engine.losses.loss import Loss
from nemotron_steps.engine.types import Policy


@contextmanager
def open_policy(
    cluster: ClusterConfig,
    config: PolicyConfig,
    checkpoint: Path,
    loss_fn: Loss,
    *,
    reference: bool,
    total_steps: int,
) -> Iterator[tuple[Policy, dict[str, Any]]]:
    """A policy that trains without a generator, where `cluster` puts it, until the block ends; and where that is, for
    the journal. Further arguments as `build_policy`."""
    if cluster.backend == "ray":
        from nemotron_steps.engine.placement.policy_alone import place_policy

        placed, resources, where = place_policy(
            cluster, config, checkpoint, loss_fn, reference=reference, total_steps=total_steps
        )
        with resources:
            yield placed, where
    else:
        policy = build_policy(config, checkpoint, loss_fn, reference=reference, total_steps=total_steps)
        yield policy, {"backend": "process"}
