"""What a step function is given: its config, its inputs, slots for its outputs, a work folder and a tracker.

`plain_context` builds one over ordinary folders, for tests of step functions and for the worker processes of a
distributed step. Nothing here touches a store: committing the filled slots is the runner's job.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from nemotron_steps.artifacts.models import Artifact
from nemotron_steps.errors import StepFailedError
from nemotron_steps.runs.tracker import Listener, Tracker

__all__ = ["OutputSlot", "StepContext", "Tracker", "plain_context"]

ConfigT = TypeVar("ConfigT")


@dataclass
class OutputSlot:
    """One output to fill.

    Attributes:
        type: the artifact type the port promises.
        path: an empty folder; every file left in it becomes part of the artifact.
        attributes: what to record with the artifact (tokenizer, architecture, metrics); JSON-serialisable.
            The type's validator adds what it can read from the files.
    """

    type: str
    path: Path
    attributes: dict[str, Any] = field(default_factory=dict)


@dataclass
class StepContext(Generic[ConfigT]):
    """The one argument of a step function.

    Attributes:
        config: the validated, frozen config model, with input paths filled in.
        inputs: port → artifact; an optional port that is not bound is absent.
        outputs: port → slot to fill.
        work: a folder that survives a kill, the same for every run with the same cache key: training
            checkpoints live here. Empty on the first attempt.
        tracker: where to report.
        step_id: the manifest's id.
        run_id: the run this belongs to.
        started: when this attempt of the run began, `time.monotonic()`.
    """

    config: ConfigT
    inputs: Mapping[str, Artifact]
    outputs: Mapping[str, OutputSlot]
    work: Path
    tracker: Tracker
    step_id: str = ""
    run_id: str = ""
    started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.inputs = _Ports(self.inputs, "input", self.step_id)
        self.outputs = _Ports(self.outputs, "output", self.step_id)


class _Ports(dict[str, Any]):
    """Port → what is there. One that the manifest does not declare, or that nothing feeds, says so."""

    def __init__(self, ports: Mapping[str, Any], kind: str, step_id: str) -> None:
        super().__init__(ports)
        self._kind, self._step_id = kind, step_id

    def __missing__(self, port: str) -> Any:
        table = "consumes" if self._kind == "input" else "produces"
        raise StepFailedError(
            f"step '{self._step_id}' asks for its {self._kind} '{port}', which it does not have here",
            expected=", ".join(self) or f"no {self._kind} at all: its manifest has no [[{table}]] that is filled",
            found=port,
            hints=(f"steps show {self._step_id}   # what its manifest declares in [[{table}]]",),
        )


def plain_context(
    config: ConfigT,
    folder: Path,
    *,
    inputs: Mapping[str, Path | Artifact] | None = None,
    outputs: Mapping[str, str] | None = None,
    listener: Listener | None = None,
    step_id: str = "",
) -> StepContext[ConfigT]:
    """A StepContext over plain folders, without a store.

    Args:
        config: the step's config model.
        folder: gets `outputs/<port>/`, `work/` and the tracker's JSON Lines files.
        inputs: port → artifact, or a folder taken as one. The folder's type and attributes are sniffed where
            they can be; it is not hashed, so its digest is empty.
        outputs: port → artifact type.
        listener: called with every record the step reports.
    """
    from nemotron_steps.artifacts.validators import sniff_type, validate

    artifacts: dict[str, Artifact] = {}
    for port, value in (inputs or {}).items():
        if isinstance(value, Artifact):
            artifacts[port] = value
            continue
        type_name = sniff_type(value)
        artifacts[port] = Artifact(
            type=type_name or "", digest="", path=value, attributes=validate(type_name, value) if type_name else {}
        )
    slots: dict[str, OutputSlot] = {}
    for port, type_name in (outputs or {}).items():
        path = folder / "outputs" / port
        path.mkdir(parents=True, exist_ok=True)
        slots[port] = OutputSlot(type_name, path)
    work = folder / "work"
    work.mkdir(parents=True, exist_ok=True)
    return StepContext(
        config=config,
        inputs=artifacts,
        outputs=slots,
        work=work,
        tracker=Tracker(step_id, folder, listener),
        step_id=step_id,
    )
