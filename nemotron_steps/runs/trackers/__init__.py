"""Copies of a run elsewhere: W&B, TensorBoard, MLflow. Each is a listener; the run folder stays the record.

A mirror that cannot write never stops a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.resolver.plan import Plan
from nemotron_steps.runs.run_folder import RunFolder
from nemotron_steps.runs.trackers.base import ExperimentTracker

if TYPE_CHECKING:
    from nemotron_steps.config.mirrors import MirrorSettings


def mirrors(
    settings: MirrorSettings, folder: RunFolder, plan: Plan, store: ArtifactStore, redact: Callable[[Any], Any]
) -> Iterator[ExperimentTracker]:
    """Every mirror that env.toml has a table for. UnsupportedError if a package it needs is not installed."""
    if settings.wandb is not None:
        from nemotron_steps.runs.trackers.wandb import WandbTracker

        yield WandbTracker(settings.wandb, folder, plan, store, redact)
    if settings.tensorboard is not None:
        from nemotron_steps.runs.trackers.tensorboard import TensorBoardTracker

        yield TensorBoardTracker(settings.tensorboard, folder, plan, store, redact)
    if settings.mlflow is not None:
        from nemotron_steps.runs.trackers.mlflow import MlflowTracker

        yield MlflowTracker(settings.mlflow, folder, plan, store, redact)
