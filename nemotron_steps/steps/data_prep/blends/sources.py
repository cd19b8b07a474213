"""What a source stands for: data files. A local file or folder, or any URL that fsspec opens.

Not for their rows: see `formats`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nemotron_steps.errors import DataError

Kind = Literal["jsonl", "gzip"]

_SUFFIXES: dict[str, Kind] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".jsonl.gz": "gzip", ".ndjson.gz": "gzip"}
_MAGIC: dict[bytes, Kind] = {b"\x1f\x8b": "gzip"}


@dataclass(frozen=True)
class DataFile:
    """One file of rows.

    Attributes:
        path: where it can be opened.
        name: relative to its source, for accounts.
        kind: how its rows are written.
        size: bytes.
        stamp: changes when the file does.
    """

    path: str
    name: str
    kind: Kind
    size: int
    stamp: str


def data_files(path: str, *, key: str) -> list[DataFile]:
    """The files of a source in name order.

    Args:
        path: a file of any name, or a folder whose data files are known by their suffixes.
        key: the config key that names the source, for errors.

    Raises:
        DataError: there is nothing, or nothing of a known kind.
    """
    root = Path(path).expanduser()
    if root.is_file():
        return [_local(root, root.name, _kind_of_file(root))]
    files = []
    if root.is_dir():
        for file in sorted(root.rglob("*")):
            kind = _kind_of_name(file.name)
            if kind is not None and file.is_file():
                files.append(_local(file, file.relative_to(root).as_posix(), kind))
    if not files:
        raise DataError(
            "there is no JSON Lines data at the given path",
            where=key,
            expected="a *.jsonl file, or a folder with some",
            found=path,
            hints=(f"{key}=FILE.jsonl", "--input source=FILE.jsonl") if key == "jsonl.path" else (f"{key}=FILE.jsonl",),
        )
    return files


def _local(path: Path, name: str, kind: Kind) -> DataFile:
    status = os.stat(path)
    return DataFile(str(path), name, kind, status.st_size, f"{status.st_size}-{status.st_mtime_ns}")


def _kind_of_name(name: str) -> Kind | None:
    return next((kind for suffix, kind in _SUFFIXES.items() if name.endswith(suffix)), None)


def _kind_of_file(path: Path) -> Kind:
    """A file named by hand may have any name: its first bytes tell."""
    with path.open("rb") as file:
        start = file.read(4)
    return next((kind for magic, kind in _MAGIC.items() if start.startswith(magic)), "jsonl")
