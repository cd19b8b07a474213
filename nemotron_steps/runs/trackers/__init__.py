"""Mirrors of a run in experiment trackers; one that cannot write never stops a run. Another package adds one under the
entry-point group `nemotron_steps.trackers`: name of its table → subclass of `base.ExperimentTracker`."""

from collections.abc import Callable, Iterator
from typing import Any

from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.config.profiles import MirrorSettings, tracker_class
from nemotron_steps.errors.plugins import load_object
from nemotron_steps.resolver.plan import Plan
from nemotron_steps.runs.run_folder import RunFolder
from nemotron_steps.runs.trackers.base import ExperimentTracker

_BUILT_IN = {"wandb": "wandb:WandbTracker", "tensorboard": "tensorboard:TensorBoardTracker"}


def trackers(
    settings: MirrorSettings, folder: RunFolder, plan: Plan, store: ArtifactStore, redact: Callable[[Any], Any]
) -> Iterator[ExperimentTracker]:
    """Every tracker that env.toml has a table for. UnsupportedError if a package it needs is not installed."""
    for name in settings.names:
        built_in = _BUILT_IN.get(name)
        tracker = load_object(f"{__name__}.{built_in}") if built_in else tracker_class(name)
        yield tracker(getattr(settings, name) if built_in else settings.others[name], folder, plan, store, redact)
