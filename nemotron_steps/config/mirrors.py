"""The tables of env.toml that say where a run is mirrored: `[wandb]`, `[tensorboard]`, `[mlflow]`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, StrictStr


class Table(BaseModel):
    """Any table of env.toml: unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class WandbSettings(Table):
    """`[wandb]`: where metrics and artifacts are mirrored."""

    project: StrictStr
    entity: StrictStr | None = None
    mode: Literal["online", "offline"] | None = None
    """None: what wandb's own settings and environment say."""


class TensorBoardSettings(Table):
    """`[tensorboard]`: event files of every run."""

    folder: StrictStr | None = None
    """Has a folder for each run. None: `tensorboard` in the run's own folder."""


class MlflowSettings(Table):
    """`[mlflow]`: an MLflow run of every executed step."""

    tracking_uri: StrictStr | None = None
    """`http://HOST:5000`, `sqlite:///FILE` or what else MLflow takes. None: what MLFLOW_TRACKING_URI says, or else
    MLflow's own default."""
    experiment: StrictStr = "nemotron-steps"


class MirrorSettings(Table):
    """Every mirror; None for one that env.toml has no table for."""

    wandb: WandbSettings | None = None
    tensorboard: TensorBoardSettings | None = None
    mlflow: MlflowSettings | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The tables that are there."""
        return tuple(name for name in type(self).model_fields if getattr(self, name) is not None)
