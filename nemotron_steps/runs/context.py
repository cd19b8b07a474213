"""What a step function is given: its config, its inputs, slots for its outputs, a work folder and a tracker. Nothing
here touches a store: committing the filled slots is the runner's job."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from nemotron_steps.artifacts.files import plain
from nemotron_steps.artifacts.models import Artifact
from nemotron_steps.errors import StepFailedError
from nemotron_steps.stopping import stop_if_asked

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
        self.kind, self.step_id = kind, step_id

    def __missing__(self, port: str) -> Any:
        what = f"step '{self.step_id}' asks for its {self.kind} '{port}', which it does not have here"
        hint = f"steps show {self.step_id}   # the ports that its manifest declares"
        raise StepFailedError(what, expected=", ".join(self) or "none", found=port, hints=(hint,))


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


Record = dict[str, Any]
FILES = {"metrics": "metrics", "sample": "samples", "groups": "groups"}
"""Kind → file of the run folder, without `.jsonl`; the other kinds are in `events`, `progress` nowhere."""

Listener = Callable[[Record], None]
"""Called with every record, in the thread that reported it.

Every record has `kind`, `time` (Unix seconds) and `step` (step id, "" for the run itself). Kinds a step causes:
`metrics` (index, values), `sample` (sample), `groups` (index, groups), `event` (name, fields), `signal` (name,
numbers), `progress` (description, completed, total), `summary` (values). Kinds the runner adds:

    run_started    run, name, resumed, steps (as Plan.to_dict)
    step_waiting   holder: another process works under the same cache key
    step_started   cache_key, work, resumed: whether the work folder holds an earlier attempt's checkpoints
    step_cached    cache_key, outputs (port → reference), reason, made_by (run id), summary
    step_finished  outputs, seconds
    step_failed    error (StepsError.to_dict), traceback
    hint           text, overrides, because, skill, failure (whether it is about a failure)
    warning        text: logged by this package; log.txt has it from the logging
    waiting        text: of a wait that is long (nemotron_steps.waiting), likewise
    run_finished   status, seconds, ran, cached, report, traceback (of a failure outside any step); written by
                   `recorder` for a process that died abruptly
"""


class JsonLines:
    """An append-only JSON Lines file. Each line is one write(2), so a kill leaves at most one partial line."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)
        self._lock = threading.Lock()
        if path.stat().st_size:
            with path.open("rb") as existing:
                existing.seek(-1, 2)
                if existing.read(1) != b"\n":
                    self._file.write(b"\n")

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record."""
        line = json.dumps(plain(record), ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            self._file.write(line)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Tracker:
    """Reports of one step.

    Args:
        step: the step's id, put on every record.
        folder: run folder whose metrics.jsonl, samples.jsonl, groups.jsonl and events.jsonl receive the records; None
            keeps nothing on disk.
        listener: also called with every record.
        redact: applied to every record before anyone sees it.
    """

    def __init__(
        self,
        step: str = "",
        folder: Path | None = None,
        listener: Listener | None = None,
        redact: Callable[[Any], Any] | None = None,
    ) -> None:
        self.step = step
        self._listener = listener
        self._redact = redact
        self._files: dict[str, JsonLines] = {}
        if folder is not None:
            self._files = {name: JsonLines(folder / f"{name}.jsonl") for name in (*FILES.values(), "events")}

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """Numbers of one training step; `step` is its index. KeyboardInterrupt where the run was asked to stop."""
        stop_if_asked()
        self._emit("metrics", {"index": int(step), "values": dict(values)})

    def sample(self, sample: Mapping[str, Any]) -> None:
        """One example worth reading: usually prompt, response, reward, index."""
        self._emit("sample", {"sample": dict(sample)})

    def groups(self, step: int, groups: Sequence[Mapping[str, Any]]) -> None:
        """What became of prompts by the end of one training step; see the engine's Reporter."""
        self._emit("groups", {"index": int(step), "groups": [dict(group) for group in groups]})

    def event(self, name: str, **fields: Any) -> None:
        """Something that happened: a checkpoint written, a phase timed, a judge retried."""
        self._emit("event", {"name": name, "fields": fields})

    def signal(self, name: str, **numbers: Any) -> None:
        """A warning sign over metrics (kl_spike, reward_saturated, ...) with the numbers that raised it."""
        self._emit("signal", {"name": name, "numbers": numbers})

    def progress(self, description: str, completed: float, total: float | None = None) -> None:
        """How far the current work is. Not kept on disk."""
        self._emit("progress", {"description": description, "completed": completed, "total": total})

    def summary(self, values: Mapping[str, Any]) -> None:
        """What the step achieved, shown at the end of the run and in the report.

        A value is a number or a text, or {"before": x, "after": y} for what the step changed; a third key
        "better" ("higher" or "lower") says which direction is an improvement. Or a table: row → column → number.
        """
        self._emit("summary", {"values": dict(values)})

    def record(self, kind: str, **fields: Any) -> None:
        """A record of the runner itself (see `execute`)."""
        self._emit(kind, fields)

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files = {}

    def _emit(self, kind: str, fields: Mapping[str, Any]) -> None:
        record: Record = {"kind": kind, "time": time.time(), "step": self.step, **fields}
        if self._redact is not None:
            record = self._redact(plain(record))
        if kind != "progress" and self._files:
            self._files[FILES.get(kind, "events")].write(record)
        if self._listener is not None:
            self._listener(record)
