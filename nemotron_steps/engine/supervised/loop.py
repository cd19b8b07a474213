"""The loop of SFT and DPO: shuffled batches, validation, checkpoints, and what the training came to."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nemotron_steps.config.schema.dpo import DpoTrainConfig
from nemotron_steps.config.schema.sft import SftTrainConfig
from nemotron_steps.engine.checkpoints.checkpoint import CheckpointManager
from nemotron_steps.engine.reporting import Reporter, first_and_last
from nemotron_steps.engine.supervised.chat_data import Example, shuffled_batches
from nemotron_steps.engine.types import Policy

logger = logging.getLogger(__name__)


def total_steps(settings: SftTrainConfig | DpoTrainConfig, batch_size: int, examples: int) -> int:
    """Optimizer steps that so many training examples give."""
    return min(settings.max_num_steps, settings.max_num_epochs * (examples // batch_size))


def train_on_examples(
    policy: Policy,
    train: Sequence[Example],
    settings: SftTrainConfig | DpoTrainConfig,
    batch_size: int,
    *,
    update: Callable[[Sequence[Example]], dict[str, float]],
    validate: Callable[[], dict[str, float]] | None,
    followed: Mapping[str, str],
    checkpoints: CheckpointManager,
    reporter: Reporter,
) -> dict[str, Any]:
    """Train to the last step, resuming from the newest checkpoint. Validated before the first step (reported as step
    0), every `val_period` steps and after the last.

    Args:
        update: trains one batch; returns the step's metrics.
        validate: returns metrics of the current weights; None where there is nothing to validate on.
        followed: metrics that progress and summary show, and how progress formats them.

    Returns:
        Summary: steps, what is followed of the first and of the last ones, validation metrics before and after.
    """
    if validate is None and settings.val_period > 0:
        logger.warning(
            "val_period=%d validates nothing: the data has no validation split (data.validation.data_path is null)",
            settings.val_period,
        )
    total = total_steps(settings, batch_size, len(train))
    step = 0
    before: dict[str, float] = {}
    metrics: dict[str, float] = {}
    history: dict[str, list[float]] = {name: [] for name in followed}
    latest = checkpoints.latest()
    if latest is not None:
        policy.load_checkpoint(latest.policy_path)
        state = latest.state()
        step, before, metrics = latest.step, state.get("validation_before", {}), state["metrics"]
        history = state.get("history", history)  # a checkpoint of 0.1.0 has none
        reporter.event("resumed", step=step)
    elif validate is not None:
        before = validate()
    if before:
        reporter.metrics(0, before)
    batches = shuffled_batches(train, batch_size, epochs=settings.max_num_epochs, seed=settings.seed, skip=step)
    checkpoints.steps_begin()
    for examples in batches:
        if step >= total:
            break
        metrics = update(examples)
        step += 1
        periodic = settings.val_period > 0 and step % settings.val_period == 0
        if validate is not None and (periodic or step == total):
            metrics.update(validate())
        for name, values in history.items():
            values.append(metrics[name])
        reporter.metrics(step, metrics)
        shown = (f"{name} {metrics[name]:{form}}" for name, form in followed.items())
        reporter.progress("  ".join(shown), step, total)
        checkpoints.check()
        if checkpoints.due(step, last=False):
            state = {"validation_before": before, "history": history, "metrics": metrics}
            checkpoints.save(step, policy, state, reported=list(before) if settings.val_period > 0 else [])
            if step < total:
                checkpoints.refuse_overtime(step, total, reporter)
    summary: dict[str, Any] = {"steps": step}
    for name, values in history.items():
        summary.update(first_and_last(f"train_{name}", values))
    for name, value in before.items():
        summary[name.replace("/", "_")] = {"before": value, "after": metrics[name]}
    return summary
