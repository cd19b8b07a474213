"""The tables of env.toml that say where a run is mirrored: `[wandb]`, `[tensorboard]`, and those of other packages."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictStr

from nemotron_steps.errors import UnsupportedError
from nemotron_steps.errors.entry_points import entry_points
from nemotron_steps.errors.plugins import load_object

ENTRY_POINT_GROUP = "nemotron_steps.trackers"
_IN_EXAMPLES = {"mlflow": "./examples/mlflow_tracker   # in a checkout of nemotron-steps"}
"""Tables whose trackers are packages under examples/, and what to install for them."""


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


class OpenTable(Table):
    """The table of a tracker that says nothing about its keys, or that is not installed: any key."""

    model_config = ConfigDict(extra="allow")


BUILT_IN: Mapping[str, type[Table]] = {"wandb": WandbSettings, "tensorboard": TensorBoardSettings}


class MirrorSettings(Table):
    """Every mirror; None for one that env.toml has no table for."""

    wandb: WandbSettings | None = None
    tensorboard: TensorBoardSettings | None = None
    others: dict[str, Any] = Field(default_factory=dict)
    """Tables of trackers that other packages bring, by name, each as its tracker's `settings_model`."""

    @property
    def names(self) -> tuple[str, ...]:
        """The tables that are there."""
        return (*(name for name in BUILT_IN if getattr(self, name) is not None), *self.others)


def mirror_names() -> frozenset[str]:
    """Tables of env.toml that are mirrors rather than profiles."""
    return frozenset({*BUILT_IN, *_IN_EXAMPLES, *(point.name for point in entry_points(ENTRY_POINT_GROUP))})


def settings_model(name: str) -> type[Table]:
    """What a mirror's table is checked against."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    brought = any(point.name == name for point in entry_points(ENTRY_POINT_GROUP))
    model: type[Table] = getattr(tracker_class(name), "settings_model", OpenTable) if brought else OpenTable
    return model


def tracker_class(name: str) -> Any:
    """The class that another package brings for a table. UnsupportedError if none does, or it cannot be loaded."""
    reference = next((point.value for point in entry_points(ENTRY_POINT_GROUP) if point.name == name), None)
    if reference is None:
        raise UnsupportedError(
            f"the [{name}] table of env.toml needs a package that brings a tracker '{name}'",
            where=f"[{name}]",
            hints=(f"pip install {_IN_EXAMPLES[name]}",),
        )
    try:
        return load_object(reference)
    except (ImportError, AttributeError) as error:
        raise UnsupportedError(f"tracker '{name}' cannot be loaded: {error}", where=reference) from error
