"""Everything one run writes about itself, redacted, and what listeners get. What happens is the runner's to decide."""

import logging
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nemotron_steps.artifacts.files import is_run_id
from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.errors import InterruptedRunError, StepsError, StorageError, WorkerLostError
from nemotron_steps.runs.context import FILES, JsonLines, Listener, Record, Tracker
from nemotron_steps.runs.hints import Signal
from nemotron_steps.runs.locks import hold_if_free
from nemotron_steps.runs.log_format import RunLog
from nemotron_steps.runs.run_folder import FAILED, INTERRUPTED, RUNNING, RunFolder, RunInfo, Secrets, read_events


class Recorder:
    """Writes the run folder and calls the listeners."""

    def __init__(self, folder: RunFolder, info: RunInfo, secret_sources: Sequence[Any]) -> None:
        self.folder = folder
        self.info = info
        secrets = Secrets(*secret_sources)
        self.redact, self.redact_text = secrets.mask, secrets.mask_text
        self.listeners: list[Listener] = []
        """Called with every record, after it is written. An exception that one raises ends the run."""
        self._log = RunLog(folder.path / "log.txt", self.redact_text)
        self._files = {name: JsonLines(folder.path / f"{name}.jsonl") for name in (*FILES.values(), "events")}
        self.signals: defaultdict[str, dict[str, Signal]] = defaultdict(dict)
        """Of each step, once with its last numbers."""
        self.summaries: defaultdict[str, dict[str, Any]] = defaultdict(dict)
        self.run = self.tracker("")

    def tracker(self, step: str) -> Tracker:
        """A tracker whose records go to this run under a step's key ("" for the run itself)."""
        return Tracker(step, listener=self._receive, redact=self.redact)

    def mask_error(self, error: StepsError) -> None:
        """Mask every secret in an error that others will show."""
        for each in (error, *getattr(error, "problems", ())):
            for name in ("what", "where", "expected", "found"):
                text = getattr(each, name)
                setattr(each, name, text and self.redact_text(text))
            each.hints = tuple(self.redact_text(hint) for hint in each.hints)
            each.args = (each.what,)

    def log_traceback(self, error: BaseException) -> None:
        """The full traceback, into log.txt only."""
        self._log.write_text("".join(traceback.format_exception(error)))

    def set_step(self, key: str, state: str, **fields: Any) -> None:
        """Change a step's state in run.json."""
        steps = {**self.info.steps, key: {**self.info.steps.get(key, {}), "state": state, **fields}}
        self.info = self.folder.update(self.info, steps=self.redact(steps))

    def set_status(self, status: str, **fields: Any) -> None:
        """Change the run's state in run.json."""
        self.info = self.folder.update(self.info, status=status, **self.redact(fields))

    @contextmanager
    def capture_logging(self) -> Iterator[None]:
        """Python's logging also goes to log.txt: this package's from INFO, others' from WARNING."""
        root, own = logging.getLogger(), logging.getLogger("nemotron_steps")
        level, warnings = own.level, _Warnings(self.run)
        own.setLevel(logging.INFO if level == logging.NOTSET else min(level, logging.INFO))
        root.addHandler(self._log)
        own.addHandler(warnings)
        try:
            yield
        finally:
            own.removeHandler(warnings)
            root.removeHandler(self._log)
            own.setLevel(level)

    def carry_over(self, store: ArtifactStore, holder: Mapping[str, Any], step: str) -> None:
        """Copy the metrics and samples that an earlier run, the last holder of the work folder, recorded of a step that
        goes on here: both runs' are one training."""
        run_id = str(holder.get("run"))
        for name in ("metrics", "samples") if is_run_id(run_id) else ():
            for record in read_events(store, run_id, name):
                if record.get("step") == holder.get("step"):
                    self._files[name].write({**record, "step": step})

    def finish(self, store: ArtifactStore, status: str, error: StepsError | None, **fields: Any) -> None:
        """Journal the end and write the report. `fields`: seconds, ran, cached, traceback of an error of no step."""
        from nemotron_steps.runs.report.page import write_report

        told, report = None if error is None else error.to_dict(), str(self.folder.path / "report.html")
        self.set_status(status, error=told)
        self.run.record("run_finished", status=status, error=told, report=report, **fields)
        write_report(self.folder.path, store)

    def close(self) -> None:
        """Close the files."""
        self._log.end()
        for file in self._files.values():
            file.close()

    def _receive(self, record: Record) -> None:
        kind, step = record["kind"], record["step"]
        if kind == "signal":
            name, seen = record["name"], self.signals[step]
            seen[name] = Signal(name, record["numbers"], seen[name].count + 1 if name in seen else 1)
        elif kind == "summary":
            self.summaries[step].update(record["values"])
        if kind != "progress":
            self._files[FILES.get(kind, "events")].write(record)
            self._log(record)
        for listener in self.listeners:
            listener(record)


class _Warnings(logging.Handler):
    """Makes records of what is logged."""

    def __init__(self, tracker: Tracker) -> None:
        super().__init__(logging.WARNING)
        self._tracker = tracker

    def emit(self, record: logging.LogRecord) -> None:
        kind = "waiting" if record.name == "nemotron_steps.waiting" else "warning"
        self._tracker.record(kind, text=record.getMessage())


@contextmanager
def unwritable_is_told(folder: Path) -> Iterator[None]:
    """Say on standard error what could not be written of a run folder (the disk may be full)."""
    try:
        yield
    except (OSError, StorageError) as error:
        print(f"note: the run folder {folder} could not be written: {error}", file=sys.stderr)


def kept(steps: Mapping[str, Mapping[str, Any]], store: ArtifactStore) -> str:
    """A clause about the steps of a run, to put behind `interrupted by SIGINT`."""
    done = [key for key, step in steps.items() if step.get("state") in ("ran", "cached", "reused")]
    said = f"kept: {', '.join(done)}" if done else "no step was finished yet"
    for key in [key for key, step in steps.items() if key not in done and "cache_key" in step]:
        places = store.backend.local("work").glob(f"{steps[key]['cache_key']}/work/checkpoints/step_*")
        last = max((int(place.name[5:]) for place in places if place.name[5:].isdigit()), default=None)
        said += f"; {key} " + ("has no checkpoint yet and begins anew" if last is None else f"up to checkpoint {last}")
    return said


def record_death(store: ArtifactStore, run_id: str, how: str, *, asked_by: str | None = None) -> StepsError:
    """Journal that a run's process is gone, as far as nobody else works on the run or has ended it."""
    folder = RunFolder(store, run_id)
    config, causes = folder.path / "config.yaml", []
    if "SIGKILL" in how:
        causes = ["dmesg | tail   # says whether the machine ran out of memory"]
    elif config.is_file() and "backend: ray" in config.read_text(encoding="utf-8"):
        causes = ["ls -t /tmp/ray/session_latest/logs   # Ray ends its driver when one of Ray's own processes dies"]
    error: StepsError = WorkerLostError(
        "the process that worked on the run ended without a word",
        where=f"run {run_id}",
        found=how,
        hints=(*causes, f"steps logs {run_id}", f"steps run --resume {run_id}"),
    )
    with hold_if_free(folder.lock) as free:
        info = folder.load()
        if asked_by is not None:
            what = f"ended by {asked_by}; {kept(info.steps if info is not None else {}, store)}"
            error = InterruptedRunError(what, where=error.where, hints=error.hints[-1:])
        if not free or info is None or info.status != RUNNING:
            return error
        recorder, ended = Recorder(folder, info, []), FAILED if asked_by is None else INTERRUPTED
        starts = [record["time"] for record in read_events(store, run_id) if record.get("kind") == "run_started"]
        states = [step.get("state") for step in info.steps.values()]
        counts = {"ran": states.count("ran"), "cached": states.count("cached") + states.count("reused")}
        try:
            for key in [key for key, step in info.steps.items() if step.get("state") == RUNNING]:
                if asked_by is None:
                    recorder.tracker(key).record("step_failed", error=error.to_dict())
                recorder.set_step(key, ended)
            recorder.finish(store, ended, error, seconds=time.time() - starts[-1] if starts else 0.0, **counts)
        finally:
            recorder.close()
            folder.publish()
    return error
