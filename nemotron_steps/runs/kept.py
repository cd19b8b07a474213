"""What of an interrupted run is kept, in words: finished steps, and the checkpoint that the step at work left."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemotron_steps.runs.work import WorkFolder

_DONE = ("ran", "cached", "reused")
_CHECKPOINT = re.compile(r"step_([0-9]{8,})")


def kept(steps: Mapping[str, Mapping[str, Any]], work: Path) -> str:
    """One clause about every step of a run, to put behind `interrupted by SIGINT`.

    Args:
        steps: as in run.json; a step that was at work has its `cache_key`.
        work: the home's folder of work folders.
    """
    done = [key for key, step in steps.items() if step.get("state") in _DONE]
    parts, anew = [], ""
    if done:
        parts.append(done[0] if len(done) == 1 else f"{len(done)} of {len(steps)} steps ({', '.join(done)})")
    for key, step in steps.items():
        if step.get("state") not in _DONE and "cache_key" in step:
            checkpoint = newest_checkpoint(WorkFolder(work, str(step["cache_key"])).work)
            if checkpoint is not None:
                parts.append(f"{key} up to its checkpoint of step {checkpoint}")
            else:
                anew = f"; {key} has no checkpoint yet and begins anew"
    return (f"kept: {', '.join(parts)}" if parts else "nothing was finished yet") + anew


def newest_checkpoint(work: Path) -> int | None:
    """The training step of the newest checkpoint in a step's work folder; None without one."""
    folder = work / "checkpoints"
    found = [_CHECKPOINT.fullmatch(path.name) for path in folder.iterdir()] if folder.is_dir() else []
    return max((int(match[1]) for match in found if match is not None), default=None)
