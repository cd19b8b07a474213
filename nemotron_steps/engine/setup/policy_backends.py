"""The policy and its teachers from their configs, in this process (or one rank's part of them). The only place that
chooses between Megatron and DTensor."""

from collections.abc import Mapping
from pathlib import Path

from nemotron_steps.config.schema.policy import PolicyConfig
from nemotron_steps.engine.losses.loss import Loss
from nemotron_steps.engine.types import Policy, Teachers
from nemotron_steps.errors import UnsupportedError


def build_policy(config: PolicyConfig, checkpoint: Path, loss_fn: Loss, *, reference: bool, total_steps: int) -> Policy:
    """The trained model in this process (or this rank's part of it)."""
    if config.dtensor_cfg.enabled:
        from nemotron_steps.engine.policy.dtensor import DTensorPolicy

        fsdp: Policy = DTensorPolicy(config, checkpoint, loss_fn, reference=reference, total_steps=total_steps)
        return fsdp
    from nemotron_steps.engine.policy.megatron import MegatronPolicy

    return MegatronPolicy(config, checkpoint, loss_fn, reference=reference, total_steps=total_steps)


def build_teachers(policy: Policy, checkpoints: Mapping[str, Path], *, topk: int | None, offload: bool) -> Teachers:
    """Teachers beside the policy of this process (or rank); arguments as `FrozenTeachers`'s."""
    from nemotron_steps.engine.policy.megatron import MegatronPolicy
    from nemotron_steps.engine.policy.teachers import FrozenTeachers

    if not isinstance(policy, MegatronPolicy):
        raise UnsupportedError(
            "only the megatron policy learns from teachers",
            where="policy.dtensor_cfg.enabled",
            hints=("policy.dtensor_cfg.enabled=false",),
        )
    return FrozenTeachers(policy, checkpoints, topk, offload=offload)
