"""A policy's training state at one step, on its way to disk: staged tensors, and the rest as JSON.

With staged copies it may be written by a thread of its own while the policy trains on. Not here: which tensors there
are (checkpoint.py, dtensor.py) and when they are saved (engine/checkpoints.py).
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemotron_steps.errors import ArtifactError
from nemotron_steps.models.distributed_checkpoint import StagedSave
from nemotron_steps.models.huggingface import copy_model_files
from nemotron_steps.models.megatron_checkpoint import WEIGHTS

STATE_FILE = "policy.json"


@dataclass(frozen=True)
class PolicySnapshot:
    """The `Snapshot` of a policy in this process (or of this rank's part of it)."""

    tensors: StagedSave
    position: dict[str, Any]
    """JSON-able: optimizer steps and random generator state."""
    source: Path
    """Folder of config.json and tokenizer."""
    carries: bool = True
    """Whether tensors that are no weights of this policy travel along."""

    def write(self, path: str) -> None:
        """Write `hf/`, `policy.json` and `weights/`. Collective; returns once every rank is done.

        Raises:
            StorageError: writing failed.
        """
        folder = Path(path)

        def beside() -> None:
            write_model_files(self.source, folder, carries=self.carries)
            (folder / STATE_FILE).write_text(json.dumps(self.position), encoding="utf-8")

        self.tensors.write(folder / WEIGHTS, beside)


def write_model_files(source: Path, folder: Path, *, carries: bool = True) -> None:
    """Config and tokenizer of `source` as `folder`/hf, and the tensors that it carries."""
    (folder / "hf").mkdir(parents=True, exist_ok=True)
    copy_model_files(source, folder / "hf", carries=carries)


def unreadable(folder: Path, error: Exception) -> ArtifactError:
    """A folder that a policy cannot go on from; `folder` is the policy's part of a training checkpoint."""
    step = folder.parent
    aside = step.with_name(f"broken_{step.name}")  # a name that no checkpoint has
    return ArtifactError(
        "not a training checkpoint",
        where=str(folder / STATE_FILE),
        found=str(error),
        hints=(f"mv {shlex.quote(str(step))} {shlex.quote(str(aside))}   # training goes on from the one before",),
    )
