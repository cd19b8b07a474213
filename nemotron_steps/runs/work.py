"""The work folder of a step: one per cache key, under a lock, surviving every kind of death.

work/<key>/work/             the step's own: training checkpoints
work/<key>/outputs/<port>/   what the step is filling
work/<key>/filled.json       the step returned; only committing is left
work/<key>.lock              held while someone works on the key
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemotron_steps.artifacts.files import remove_tree, to_json_bytes, write_atomic
from nemotron_steps.artifacts.jsonable import plain
from nemotron_steps.artifacts.records import NUMBER, json_object, require_shape
from nemotron_steps.runs.context import OutputSlot
from nemotron_steps.runs.locks import hold_if_free

_DONE = ("ran", "cached", "reused")
_CHECKPOINT = re.compile(r"step_([0-9]{8,})")


@dataclass(frozen=True)
class WorkFolder:
    """The work folder of one cache key. Every method but `remove_if_abandoned` needs the lock to be held."""

    root: Path
    key: str

    @property
    def lock(self) -> Path:
        """The lock file; it stays when the folder goes."""
        return self.root / f"{self.key}.lock"

    @property
    def path(self) -> Path:
        """The folder of this key."""
        return self.root / self.key

    @property
    def work(self) -> Path:
        """The step's own folder."""
        return self.path / "work"

    def has_progress(self) -> bool:
        """Whether an earlier attempt left something to continue from."""
        return self._filled.is_file() or (self.work.is_dir() and any(self.work.iterdir()))

    def prepare(self, produces: Mapping[str, str]) -> dict[str, OutputSlot]:
        """Empty slots for a step about to run; what a killed attempt half filled is cleared."""
        self.reject()
        self.work.mkdir(parents=True, exist_ok=True)
        slots = {port: OutputSlot(type_name, self._outputs / port) for port, type_name in produces.items()}
        for slot in slots.values():
            slot.path.mkdir(parents=True)
        return slots

    def mark_filled(self, slots: Mapping[str, OutputSlot], summary: Mapping[str, Any], seconds: float) -> None:
        """The step returned: from here on a killed run only has to commit."""
        record = {
            "slots": {port: {"type": slot.type, "attributes": slot.attributes} for port, slot in slots.items()},
            "summary": dict(summary),
            "seconds": seconds,
        }
        write_atomic(self._filled, to_json_bytes(plain(record)))

    def filled(self, produces: Mapping[str, str]) -> tuple[dict[str, OutputSlot], dict[str, Any], float] | None:
        """(slots, summary, seconds) an earlier attempt filled and did not commit; None if there are none.

        Args:
            produces: port → type of what the step makes.

        Raises ArtifactError if the note of it is not one that this step left.
        """
        try:
            data = self._filled.read_bytes()
        except FileNotFoundError:
            return None
        record = json_object(data, str(self._filled))
        # Its ports are names of folders to be moved into the home: none but the step's own.
        slot = {port: {"type": re.compile(re.escape(name)), "attributes": dict} for port, name in produces.items()}
        hints = (f"rm {shlex.quote(str(self._filled))}   # then the step runs again, from its checkpoints",)
        require_shape(record, {"slots": slot, "summary": dict, "seconds": NUMBER}, str(self._filled), hints)
        slots = {
            port: OutputSlot(slot["type"], self._outputs / port, slot["attributes"])
            for port, slot in record["slots"].items()
        }
        if not all(slot.path.is_dir() for slot in slots.values()):
            # Killed between two outputs' commits: the step is asked again, and finds its checkpoints.
            return None
        return slots, record["summary"], float(record["seconds"])

    def reject(self) -> None:
        """What the step filled is not valid: forget it, keep the step's own folder."""
        self._filled.unlink(missing_ok=True)
        remove_tree(self._outputs)

    def remove_if_abandoned(self) -> None:
        """Everything is committed: remove what a kill just before `remove` left, unless someone is at work in it."""
        if self.path.exists():
            with hold_if_free(self.lock) as free:
                if free:
                    self.remove()

    def remove(self) -> None:
        """Everything is committed, or must start over."""
        # First, so that a kill in the middle of the deletion leaves nothing that looks complete.
        self._filled.unlink(missing_ok=True)
        remove_tree(self.path)

    @property
    def _outputs(self) -> Path:
        return self.path / "outputs"

    @property
    def _filled(self) -> Path:
        return self.path / "filled.json"


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
