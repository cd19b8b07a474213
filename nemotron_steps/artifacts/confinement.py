"""Paths that records name stay where they belong: below a home's folder, or below an artifact's own.

A home may be shared, so what its records say is checked before it is used: the text (no `..`, not absolute), and the
file system (no symbolic link on the way leads out). Not for paths that the user typed.
"""

import os
import re
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

from nemotron_steps.errors import ArtifactError

_LONGEST_PART = 255
_LONGEST_PATH = 4096
_DIGEST = re.compile(r"[0-9a-f]{64}")
_RUN_ID = re.compile(r"\w[\w.-]{0,199}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
"""Characters no path of a record has: control characters, and what stands for bytes that are not UTF-8."""


def is_digest(text: str) -> bool:
    """Whether text is a sha256 in hex, which names objects."""
    return bool(_DIGEST.fullmatch(text))


def is_run_id(text: str) -> bool:
    """Whether text can name a run's folder."""
    return bool(_RUN_ID.fullmatch(text))


def require_relative(path: str, where: str) -> str:
    """`path` if it is a plain relative posix path. ArtifactError naming `where` it was read if it is anything else."""
    parts = path.split("/")
    if (
        _CONTROL.search(path)
        or len(path.encode()) > _LONGEST_PATH
        or any(part in ("", ".", "..") or len(part.encode()) > _LONGEST_PART for part in parts)
    ):
        raise ArtifactError(
            "a record names a path that leaves its folder",
            where=where,
            expected="a relative path without `..`",
            found=repr(path if len(path) <= 120 else path[:117] + "..."),
            hints=("steps artifacts verify",),
        )
    return path


def confined(root: Path, relative: str) -> Path:
    """`root / relative`, where following symbolic links does not lead out of the first folder of `relative`.

    That first folder may itself be a link: people move `artifacts/` to another disk. ArtifactError if it would."""
    require_relative(relative, str(root))
    path, (first, *below) = root / relative, relative.split("/")
    base = os.path.join(root, first)
    # Without a link on the way it is where its name says. Resolving takes many times as long, and this is asked for
    # every file that is read.
    if any(map(os.path.islink, accumulate(below, os.path.join, initial=base))):
        base, real = os.path.realpath(base), os.path.realpath(path)
        if real != base and not real.startswith(base.rstrip(os.sep) + os.sep):
            raise _leaves(path, real)
    return path


def walk(folder: Path, *, follow: Path | None, skip_hidden: bool = False) -> Iterator[Path]:
    """Every file below a folder. ArtifactError for names with control characters or not UTF-8.

    Symbolic links to files below `follow` count as the files, any other link is refused; with None links are left out.
    """
    pending = [folder]
    while pending:
        here = pending.pop()
        with os.scandir(here) as entries:
            for entry in entries:
                if skip_hidden and here == folder and entry.name.startswith("."):
                    continue
                path = here / entry.name
                if entry.is_symlink():
                    if follow is None:
                        continue
                    target = os.path.realpath(path)
                    if not target.startswith(os.path.realpath(follow).rstrip(os.sep) + os.sep):
                        raise _leaves(path, target)
                    if not os.path.isfile(target):
                        raise ArtifactError(
                            "a symbolic link does not lead to a file",
                            where=str(path),
                            expected="links to files only: a linked folder is not followed",
                            found=f"a link to {target}",
                        )
                elif entry.is_dir():
                    pending.append(path)
                    continue
                elif not entry.is_file():
                    continue
                if _CONTROL.search(path.name):
                    what = "a file's name holds control characters or is not UTF-8"
                    raise ArtifactError(what, where=repr(str(path)), hints=("rename it",))
                yield path


def link_root(folder: Path) -> Path:
    """Where links in a folder that a user supplies may lead: into itself; for a snapshot of the model hub's cache,
    whose files are all links, into that model's part of the cache."""
    real = Path(os.path.realpath(folder))
    is_snapshot = real.parent.name == "snapshots" and real.parent.parent.name.startswith(("models--", "datasets--"))
    return real.parent.parent if is_snapshot else real


def _leaves(path: Path, target: str) -> ArtifactError:
    return ArtifactError(
        "a symbolic link leads out of the folder",
        where=str(path),
        expected="files, or links to files of the same folder",
        found=f"a link to {target}",
        hints=(f"cp -rL {path.parent} COPY   # a copy with the files in place of links",),
    )
