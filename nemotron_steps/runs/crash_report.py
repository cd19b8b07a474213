"""The end of a run whose process died without writing it down (killed, crashed, or ended by a library), and what of an
interrupted run is kept."""

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.errors import InterruptedRunError, StepsError, WorkerLostError
from nemotron_steps.runs.locks import hold_if_free
from nemotron_steps.runs.recorder import Recorder
from nemotron_steps.runs.run_folder import FAILED, INTERRUPTED, RUNNING, RunFolder, read_events
from nemotron_steps.runs.step_workdir import WorkFolder

_DONE = ("ran", "cached", "reused")
_CHECKPOINT = re.compile(r"step_([0-9]{8,})")


def kept(steps: Mapping[str, Mapping[str, Any]], work: Path) -> str:
    """One clause about every step of a run, to put behind `interrupted by SIGINT`."""
    done = [key for key, step in steps.items() if step.get("state") in _DONE]
    parts, anew = [], ""
    if done:
        parts.append(done[0] if len(done) == 1 else f"{len(done)} of {len(steps)} steps ({', '.join(done)})")
    for key, step in steps.items():
        if step.get("state") not in _DONE and "cache_key" in step:
            folder = WorkFolder(work, str(step["cache_key"])).work / "checkpoints"
            found = [_CHECKPOINT.fullmatch(path.name) for path in folder.iterdir()] if folder.is_dir() else []
            checkpoint = max((int(match[1]) for match in found if match is not None), default=None)
            if checkpoint is not None:
                parts.append(f"{key} up to its checkpoint of step {checkpoint}")
            else:
                anew = f"; {key} has no checkpoint yet and begins anew"
    return (f"kept: {', '.join(parts)}" if parts else "nothing was finished yet") + anew


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
            left = kept(info.steps if info is not None else {}, store.backend.local("work"))
            error = InterruptedRunError(f"ended by {asked_by}; {left}", where=error.where, hints=error.hints[-1:])
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
