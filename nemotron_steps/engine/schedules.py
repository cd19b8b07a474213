"""Values that change over training: learning rate, sequence length, shares that anneal. Pure functions of the step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from nemotron_steps.errors import ConfigError

if TYPE_CHECKING:
    from nemotron_steps.config.schema.policy import OptimizerConfig, SchedulerConfig


def progress(step: int, total_steps: int) -> float:
    """How far step `step` of `total_steps` is along, 0 at the first (step 0) and 1 at the last (total_steps - 1)."""
    if total_steps <= 1:
        return 1.0
    return min(max(step / (total_steps - 1), 0.0), 1.0)


def linear(start: float, end: float, fraction: float) -> float:
    """start at fraction 0, end at fraction 1, a straight line between."""
    return start + (end - start) * fraction


def cosine(start: float, end: float, fraction: float) -> float:
    """Cosine annealing: end + (start - end)(1 + cos(pi fraction)) / 2, flat at both ends."""
    return end + (start - end) * 0.5 * (1.0 + math.cos(math.pi * fraction))


def learning_rate(step: int, optimizer: OptimizerConfig, scheduler: SchedulerConfig) -> float:
    """Learning rate of optimizer step `step` (0-based): linear warm-up, then constant, linear or cosine decay.

    Warm-up step k of W uses lr (k + 1) / W, so the first step already moves; with init = lr_warmup_init it uses
    init + (lr - init) k / W, as in Megatron. Decay runs from there to `lr_decay_iters`, then stays at min_lr.
    """
    warmup = scheduler.lr_warmup_iters
    if step < warmup:
        init = scheduler.lr_warmup_init
        return linear(init, optimizer.lr, step / warmup) if init else optimizer.lr * (step + 1) / warmup
    if scheduler.lr_decay_style == "constant":
        return optimizer.lr
    if scheduler.lr_decay_iters is None:
        key = "policy.megatron_cfg.scheduler.lr_decay_iters"
        raise ConfigError(
            f"lr_decay_style={scheduler.lr_decay_style} has no step at which the decay ends",
            where=key,
            expected=f"lr_decay_iters > lr_warmup_iters = {warmup}",
            found="null",
            hints=(f"{key}={10 * max(warmup, 10)}", "policy.megatron_cfg.scheduler.lr_decay_style=constant"),
        )
    fraction = min((step - warmup) / (scheduler.lr_decay_iters - warmup), 1.0)
    curve = linear if scheduler.lr_decay_style == "linear" else cosine
    return curve(optimizer.lr, optimizer.min_lr, fraction)


def sequence_length(step: int, total_steps: int, start: int, end: int | None, *, multiple: int = 1) -> int:
    """Longest sequence of step `step`: linear from `start` to `end` over the run, rounded down to `multiple`."""
    if end is None:
        return start
    length = int(linear(start, end, progress(step, total_steps)))
    return max(length // multiple * multiple, min(start, end))
