"""Copies of a run elsewhere: W&B, TensorBoard, MLflow. Each is a listener; the run folder stays the record.

A mirror that cannot write never stops a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.resolver.plan import Plan
from nemotron_steps.runs.mirrors.base import Mirror
from nemotron_steps.runs.run_folder import RunFolder

if TYPE_CHECKING:
    from nemotron_steps.config.profiles import MirrorSettings


def mirrors(
    settings: MirrorSettings, folder: RunFolder, plan: Plan, store: ArtifactStore, redact: Callable[[Any], Any]
) -> Iterator[Mirror]:
    """Every mirror that env.toml has a table for. UnsupportedError if a package it needs is not installed."""
    if settings.wandb is not None:
        from nemotron_steps.runs.mirrors.wandb import WandbMirror

        yield WandbMirror(settings.wandb, folder, plan, store, redact)
    if settings.tensorboard is not None:
        from nemotron_steps.runs.mirrors.tensorboard import TensorBoardMirror

        yield TensorBoardMirror(settings.tensorboard, folder, plan, store, redact)
    if settings.mlflow is not None:
        from nemotron_steps.runs.mirrors.mlflow import MlflowMirror

        yield MlflowMirror(settings.mlflow, folder, plan, store, redact)
