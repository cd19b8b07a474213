"""What an artifact is: a typed folder of hashed files with attributes, a producer and input edges. Plain data only."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nemotron_steps.errors import ArtifactError, DataError

MANIFEST_NAME = "artifact.json"
"""The file whose presence commits an artifact."""

LONGEST_NAME = 200
"""Characters of an artifact's name, which is a folder's name in the home."""

_SPLIT_NAMES = {"validation": ("validation", "val"), "heldout": ("heldout", "test")}

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*")


def split_file(folder: Path, split: str) -> Path | None:
    """The JSON Lines file of one split in a folder, under the names that `Artifact.jsonl` tells."""
    for name in _SPLIT_NAMES.get(split, (split,)):
        for pattern in (f"{name}.jsonl", f"{name}-split.jsonl", f"{name}/data.jsonl"):
            if (folder / pattern).is_file():
                return folder / pattern
    return None


@dataclass(frozen=True)
class FileRecord:
    """One file of an artifact: path relative to its folder (posix), size in bytes, sha256 in hex."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Producer:
    """Which step, port and run wrote an artifact, under which cache key."""

    step: str
    port: str
    run: str
    step_version: str = ""
    cache_key: str = ""
    config: str = ""
    """Name or path of the step's config."""
    package: str = ""
    """Version of nemotron_steps that made it; "" in records from before it was kept."""
    accepted: tuple[Mapping[str, Any], ...] = ()
    """By whom it was taken for what the step would make since, oldest first: {by, at, key, version, changed}, the key
    and version that it had until then and the code that changed."""

    @property
    def made_under(self) -> str:
        """The cache key under which the run made it."""
        return str(self.accepted[0]["key"]) if self.accepted else self.cache_key

    @property
    def acceptance(self) -> str:
        """Who accepted it last and all that changed since it was made, as a line; "" where nobody had to."""
        if not self.accepted:
            return ""
        last = self.accepted[-1]
        changed = list(dict.fromkeys(name for each in self.accepted for name in each["changed"]))
        return f"by {last['by']}: {made_by(last['version'], changed)}"


@dataclass(frozen=True)
class Edge:
    """One input of the step that produced an artifact: the port it was bound to and the artifact's digest."""

    port: str
    digest: str
    ref: str = ""


@dataclass(frozen=True)
class Artifact:
    """A committed artifact, readable as a local folder.

    `digest` is the tree digest (see tree_digest): same type and same files give the same digest, wherever and
    whenever they were written. `path` is a local folder holding exactly `files`; for an artifact of a remote
    home it is the verified local copy.
    """

    type: str
    digest: str
    path: Path
    attributes: Mapping[str, Any] = field(default_factory=dict)
    files: tuple[FileRecord, ...] = ()
    name: str = ""
    version: int = 0
    """0 in an object's own artifact.json: the version records number it."""
    producer: Producer | None = None
    inputs: tuple[Edge, ...] = ()
    created: float = 0.0
    source: str = ""
    """Where a user-supplied artifact came from; empty for one that a step wrote."""
    location: str = ""
    """The user's own folder, for an artifact that is used in place instead of being copied into the home."""
    home: str = field(default="", compare=False, repr=False)
    """The home that it was found in."""

    @property
    def id(self) -> str:
        """The tree digest, under which the store keeps the artifact."""
        return self.digest

    @property
    def ref(self) -> str:
        """`NAME:vN`, or the short digest of an artifact that has no version."""
        return f"{self.name}:v{self.version}" if self.version else short_digest(self.digest)

    def jsonl(self, split: str = "train") -> Path | None:
        """The JSON Lines file of one split: train, validation or heldout (test); None when there is no such split.

        `<split>.jsonl`, or the names of the published blends (`train-split.jsonl`, `val-split.jsonl`,
        `val/data.jsonl`); for `train` also the only JSON Lines file of the folder, so that a single file a user
        supplies is a training set.
        """
        found = split_file(self.path, split)
        if found is not None:
            return found
        candidates = sorted(self.path.glob("*.jsonl"))
        return candidates[0] if split == "train" and len(candidates) == 1 else None

    def require_jsonl(self, split: str = "train") -> Path:
        """As `jsonl`, but a missing split is a DataError naming the folder."""
        path = self.jsonl(split)
        if path is None:
            found = ", ".join(sorted(p.name for p in self.path.iterdir())[:8]) or "an empty folder"
            raise DataError(
                f"artifact '{self.ref}' has no '{split}' split",
                where=str(self.path),
                expected=f"{split}.jsonl",
                found=found,
            )
        return path

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Copy its files into a new or an empty folder, verified, as `steps artifacts export` does; that folder."""
        from nemotron_steps.artifacts.export import export
        from nemotron_steps.artifacts.store import ArtifactStore

        return export(ArtifactStore(self.home or None), self, Path(folder))

    def to_json(self) -> dict[str, Any]:
        """The fields of `artifact.json` (no local path: the folder may be anywhere). `records` reads them back."""
        return {
            "type": self.type,
            "digest": self.digest,
            "name": self.name,
            "version": self.version,
            "attributes": dict(self.attributes),
            "files": [{"path": f.path, "size": f.size, "sha256": f.sha256} for f in self.files],
            "producer": {k: v for k, v in vars(self.producer).items() if v or k not in ("accepted", "package")}
            if self.producer
            else None,
            "inputs": [vars(edge) for edge in self.inputs],
            "created": self.created,
            "source": self.source,
            "location": self.location,
        }

    def at(self, path: Path) -> Artifact:
        """The same artifact read from another local folder."""
        return replace(self, path=path)


def made_by(version: str, changed: Sequence[str]) -> str:
    """Who made what may be accepted, and what of the code changed since, as a line."""
    more = f" and {len(changed) - 4} more" if len(changed) > 4 else ""
    return f"made by {version or 'an earlier version'}, changed: {', '.join(changed[:4])}{more}"


def tree_digest(type_name: str, files: Iterable[FileRecord]) -> str:
    """sha256 over the type and every (path, sha256), sorted by path: independent of order, times and place."""
    digest = hashlib.sha256(f"nemotron-steps-artifact-1\0{type_name}\0".encode())
    for record in sorted(files, key=lambda f: f.path):
        digest.update(f"{record.path}\0{record.sha256}\0".encode())
    return digest.hexdigest()


def short_digest(digest: str) -> str:
    """The first 12 hex digits, enough to name an artifact in print."""
    return digest[:12]


def parse_ref(text: str) -> tuple[str, str]:
    """Split `NAME[:VERSION]` into (name, version), VERSION one of `vN`, `N` or `latest`, which it is when left out."""
    name, _, version = text.partition(":")
    version = version or "latest"
    if version.isdigit():
        version = f"v{version}"
    if not is_artifact_name(name) or not re.fullmatch(r"latest|v[1-9][0-9]{0,8}", version):
        raise ArtifactError(
            f"'{text}' is not an artifact reference",
            expected="NAME, NAME:vN or NAME:latest",
            hints=("steps artifacts list",),
        )
    return name, version


def is_artifact_name(text: str) -> bool:
    """Whether text can name an artifact: at most 200 letters, digits and `._/-`, no empty or dotted path part."""
    if len(text) > LONGEST_NAME or not _NAME.fullmatch(text):
        return False
    return all(part not in ("", ".", "..") for part in text.split("/"))
