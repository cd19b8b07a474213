"""The artifacts of a home: list, find, open, lineage."""

from __future__ import annotations

import builtins
import os
from pathlib import Path
from typing import Any

from nemotron_steps.artifacts.lineage import lineage
from nemotron_steps.artifacts.models import Artifact
from nemotron_steps.artifacts.store import ArtifactStore


class Artifacts:
    """The artifacts of a home.

    Args:
        home: a folder or an fsspec URL; None for STEPS_HOME, or `.steps`.
    """

    def __init__(self, home: str | os.PathLike[str] | None = None) -> None:
        self._store = ArtifactStore(None if home is None else os.fspath(home))

    @classmethod
    def of(cls, store: ArtifactStore) -> Artifacts:
        """Those of a store that is open already."""
        found = cls.__new__(cls)
        found._store = store
        return found

    def list(self, *, type: str | None = None, name: str | None = None) -> builtins.list[Artifact]:
        """The record of every version, by name and version; the filters are exact."""
        return self._store.list_artifacts(type_name=type, name=name)

    def find(self, ref: str) -> Artifact:
        """The record of `NAME`, `NAME:vN`, `NAME:latest` or a digest. UnknownNameError with near names."""
        return self._store.find(ref)

    def path(self, ref: str | Artifact) -> Path:
        """An artifact's folder on this machine, its files verified.

        Raises UnknownNameError if there is none, ArtifactError if its files are not those that were committed.
        """
        return self._store.open(ref).path

    def lineage(self, ref: str | Artifact) -> dict[str, Any]:
        """What an artifact was made from (`ancestors`) and what was made from it (`descendants`), nearest first."""
        artifact = self._store.find(ref) if isinstance(ref, str) else ref
        return lineage(self._store, artifact).to_dict()

    def __repr__(self) -> str:
        return f"Artifacts({self._store.backend.url!r})"
