"""Folders and files of the user's own: their type, attributes and hashes, remembered outside the home.

A note per path, in the user's cache, has what was found when it was last hashed. It is also what allows an artifact
that is used in place to be read: a record of a shared home may name any folder, but only one that this user gave as
an input, on this machine, is read.
"""

import hashlib
import json
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemotron_steps.artifacts.files import hash_tree, plain, stat_of, to_json_bytes, tree_files, write_atomic
from nemotron_steps.artifacts.models import LONGEST_NAME, Artifact, FileRecord, tree_digest
from nemotron_steps.artifacts.validators import sniff_type, validate
from nemotron_steps.errors import ArtifactError, StorageError

logger = logging.getLogger(__name__)

_WORTH_SAYING = 200_000_000
"""Bytes that take long enough to hash that somebody wonders."""


class Imports:
    """Notes about what the user supplied, kept in a folder that is nobody else's."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._allowed: set[str] = set()

    def identify(
        self, path: Path, *, type_name: str | None = None, supertypes: Sequence[str] = (), name: str | None = None
    ) -> Artifact:
        """What a path holds, as an artifact that is not in any home. From then on its folder may be read in place.

        It is validated and hashed once, and again when a file's size, times or inode change."""
        if not path.exists():
            raise ArtifactError("there is nothing at this path", where=str(path))
        path = path.absolute()
        files = [path] if path.is_file() else tree_files(path, user_folder=True)
        root = path.parent if path.is_file() else path
        stats = {file.relative_to(root).as_posix(): stat_of(file) for file in files}
        known = self._read(path)
        if known and known.get("stats") == stats and type_name in (None, known["type"]):
            type_name, found = str(known["type"]), dict(known["attributes"])
            records = [FileRecord(file, stats[file][0], digest) for file, digest in known["hashes"].items()]
        else:
            type_name = type_name or require_type(path)
            found = plain(validate(type_name, path, supertypes))
            size = sum(each[0] for each in stats.values())
            if size >= _WORTH_SAYING:
                logger.warning("hashing %s (%.1f GB): once, and again when it changes", path, size / 1e9)
            records = hash_tree(path, user_folder=True)
            hashes = {record.path: record.sha256 for record in records}
            self._write(path, {"type": type_name, "stats": stats, "hashes": hashes, "attributes": found})
        self._allowed.add(str(path))
        return Artifact(
            type=type_name,
            digest=tree_digest(type_name, records),
            path=path,
            attributes=found,
            files=tuple(records),
            name=name or default_name(path),
            created=time.time(),
            source=str(path),
            location=str(path),
        )

    def allows(self, location: str) -> bool:
        """Whether this user supplied that folder, so that it may be read because a record says so."""
        return location in self._allowed or self._read(Path(location)) is not None

    def _note(self, path: Path) -> Path:
        return self._folder / f"{hashlib.sha256(str(path).encode(errors='surrogateescape')).hexdigest()[:32]}.json"

    def _read(self, path: Path) -> dict[str, Any] | None:
        try:
            note = json.loads(self._note(path).read_bytes())
        except (OSError, ValueError):
            return None
        return note if isinstance(note, dict) and note.get("path") == str(path) else None

    def _write(self, path: Path, note: Mapping[str, Any]) -> None:
        try:
            write_atomic(self._note(path), to_json_bytes({"path": str(path), **note}))
        except (StorageError, OSError) as error:
            # A read-only home folder costs time, not the run: the next command hashes again.
            logger.warning("could not remember the hashes of %s: %s", path, error)


def require_type(path: Path) -> str:
    """The type of a user's file or folder by its contents. ArtifactError if it cannot be told."""
    if not path.exists():
        raise ArtifactError("there is nothing at this path", where=str(path))
    type_name = sniff_type(path)
    if type_name is None:
        what, hints = "the artifact type cannot be told from the files", (f"steps artifacts add {path} --type <type>",)
        expected = "config.json and safetensors (checkpoint_hf), hf/ and weights/ (checkpoint_megatron), *.jsonl"
        raise ArtifactError(what, where=str(path), expected=expected, hints=hints)
    return type_name


def default_name(path: Path) -> str:
    """The name of a user-supplied artifact: `input/` and the file's or folder's name."""
    stem = path.stem if path.is_file() else path.name
    cleaned = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in stem).strip(".-")
    return f"input/{cleaned or 'unnamed'}"[:LONGEST_NAME].rstrip(".-")
