"""The trained model: on megatron-core, or on torch alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from nemotron_steps.config.schema.policy import PolicyConfig
from nemotron_steps.engine.losses.loss import Loss
from nemotron_steps.engine.types import Policy, Teachers


def build_policy(config: PolicyConfig, checkpoint: Path, loss_fn: Loss, *, reference: bool, total_steps: int) -> Policy:
    """The trained model in this process (or this rank's part of it)."""
    if config.dtensor_cfg.enabled:
        from nemotron_steps.engine.policy.dtensor import DTensorPolicy

        fsdp: Policy = DTensorPolicy(config, checkpoint, loss_fn, reference=reference, total_steps=total_steps)
        return fsdp
    from nemotron_steps.engine.policy.megatron import MegatronPolicy

    return MegatronPolicy(config, checkpoint, loss_fn, reference=reference, total_steps=total_steps)


def build_teachers(
    config: PolicyConfig, checkpoints: Mapping[str, Path], *, topk: int | None, vocab_size: int, offload: bool
) -> Teachers:
    """Teachers beside the policy that this process (or rank) has already built; arguments as `FrozenTeachers`'s."""
    from nemotron_steps.engine.policy.teachers import FrozenTeachers

    return FrozenTeachers(config, checkpoints, topk, vocab_size=vocab_size, offload=offload)
