"""Which mirrors a run has."""

from __future__ import annotations

from typing import Any

import pytest

from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.config.mirrors import MirrorSettings, MlflowSettings, TensorBoardSettings, WandbSettings
from nemotron_steps.runs.run_folder import RunFolder
from nemotron_steps.runs.trackers import mirrors
from nemotron_steps.runs.trackers.base import leaves

BOARD, WANDB = TensorBoardSettings(), WandbSettings(project="toy", mode="offline")
MLFLOW = MlflowSettings()


@pytest.mark.parametrize(
    ("settings", "kinds"),
    [
        (MirrorSettings(), []),
        (MirrorSettings(wandb=WANDB), ["WandbTracker"]),
        (MirrorSettings(tensorboard=BOARD), ["TensorBoardTracker"]),
        (MirrorSettings(wandb=WANDB, tensorboard=BOARD), ["WandbTracker", "TensorBoardTracker"]),
        (MirrorSettings(mlflow=MLFLOW, tensorboard=BOARD), ["TensorBoardTracker", "MlflowTracker"]),
    ],
)
def test_a_run_is_mirrored_to_all_that_is_asked_for(
    settings: MirrorSettings, kinds: list[str], store: ArtifactStore
) -> None:
    pytest.importorskip("wandb")
    pytest.importorskip("tensorboardX")
    if settings.mlflow:
        pytest.importorskip("mlflow")
    unused: Any = None
    made = mirrors(settings, RunFolder(store, "r1"), unused, store, unused)
    assert [type(mirror).__name__ for mirror in made] == kinds


def test_a_summarys_empty_part_is_a_value_of_its_own_and_no_name_begins_with_a_separator() -> None:
    assert list(leaves({"a": {}, "b": {"c": {"d": 1}}, "e": 2}, "", ".")) == [("a", {}), ("b.c.d", 1), ("e", 2)]
    assert list(leaves({"a": {"b": 1}}, "summary", "/")) == [("summary/a/b", 1)]
    assert list(leaves({}, "", ".")) == [] and list(leaves({}, "x", ".")) == [("x", {})]
