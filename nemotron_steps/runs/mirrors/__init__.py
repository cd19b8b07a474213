"""Copies of a run elsewhere: W&B, TensorBoard, MLflow. Each is a listener; the run folder stays the record.

A mirror that cannot write never stops a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.resolver.plan import Plan
from nemotron_steps.runs.run_folder import RunFolder
from nemotron_steps.runs.tracker import Record

if TYPE_CHECKING:
    from nemotron_steps.config.mirrors import MirrorSettings


class Mirror(Protocol):
    """A listener that is closed at the end of the run, however it ended."""

    def __call__(self, record: Record) -> None:
        """Mirror one record."""

    def close(self) -> None:
        """Write what is left. Also called for a run that was interrupted."""


def mirrors(
    settings: MirrorSettings, folder: RunFolder, plan: Plan, store: ArtifactStore, redact: Callable[[Any], Any]
) -> Iterator[Mirror]:
    """Every mirror that env.toml has a table for. UnsupportedError if a package it needs is not installed."""
    if settings.wandb is not None:
        from nemotron_steps.runs.mirrors.wandb import WandbMirror

        yield WandbMirror(settings.wandb, folder, plan, store, redact)
    if settings.tensorboard is not None:
        from nemotron_steps.runs.mirrors.tensorboard import TensorBoardMirror

        yield TensorBoardMirror(settings.tensorboard, folder)
    if settings.mlflow is not None:
        from nemotron_steps.runs.mirrors.mlflow import MlflowMirror

        yield MlflowMirror(settings.mlflow, folder, plan, store, redact)
