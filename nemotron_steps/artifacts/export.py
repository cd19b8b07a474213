"""An artifact's files copied out of the home: written beside the target, verified, renamed once whole."""

import logging
import os
import shlex
import shutil
from itertools import count
from pathlib import Path

from nemotron_steps.artifacts.files import hash_tree, storage_errors, sync_folder
from nemotron_steps.artifacts.integrity import differences
from nemotron_steps.artifacts.models import Artifact
from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.errors import RequestError

_LOG = logging.getLogger(__name__)
_WORTH_SAYING = 1_000_000_000
"""Bytes that take long enough to copy that somebody wonders."""


def export(store: ArtifactStore, artifact: Artifact, folder: Path, *, card: str = "", command: str = "") -> Path:
    """Copy an artifact's files into a new or an empty folder, which gets all of them or stays as it is.

    Args:
        card: README.md, in place of the artifact's own.
        command: what a refusal suggests before another folder.

    Raises RequestError for a folder that holds anything, ArtifactError for files that are not those committed.
    """
    target = free_folder(artifact, folder, command or f"steps artifacts export {artifact.ref}")
    artifact = store.open(artifact)
    size = sum(record.size for record in artifact.files)
    if size >= _WORTH_SAYING:
        _LOG.warning("copying %.1f GB to %s", size / 1e9, target)
    with storage_errors(target), store.staging(target) as staged:
        for record in artifact.files:
            (staged / record.path).parent.mkdir(parents=True, exist_ok=True)
            with (artifact.path / record.path).open("rb") as source, (staged / record.path).open("wb") as copy:
                shutil.copyfileobj(source, copy, 1 << 22)
                copy.flush()
                os.fsync(copy.fileno())
        for problem in differences(artifact, hash_tree(staged), str(artifact.path)):
            raise problem
        if card:
            (staged / "README.md").write_text(card, encoding="utf-8")
        staged.rename(target)
        sync_folder(target.parent)
    return target


def free_folder(artifact: Artifact, folder: Path, command: str) -> Path:
    """The folder, links followed, where it can be renamed to: it is not there, or it is empty and nobody's place.
    RequestError for another, with `command` and a folder that is free."""
    target = folder.expanduser().absolute()
    there = next(path for path in (target, *target.parents) if os.path.lexists(path))
    held = ["a file"] if not there.is_dir() else sorted(os.listdir(there))[:4] if there == target else []
    if there == target and not held and (there.is_mount() or there.samefile(".")):
        held = ["a mount point or the working directory"]
    if not held:
        return target.resolve()
    base = there if there.is_dir() else there.parent
    names = (f"{artifact.name.rpartition('/')[2]}-v{artifact.version}{(n and -n) or ''}" for n in count())
    other = next(base / name for name in names if not os.path.lexists(base / name))
    what, hints = "an artifact is copied into a new or an empty folder", (f"{command} {shlex.quote(str(other))}",)
    raise RequestError(what, where=str(there), found=", ".join(held), hints=hints)
