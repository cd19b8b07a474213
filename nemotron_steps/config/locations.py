"""Where the user's own files are: env.toml, and the folder of caches."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

ENVIRONMENT_FILE = "env.toml"
ENVIRONMENT_VARIABLE = "NEMOTRON_ENV_FILE"
"""Names the file to read in place of the nearest `env.toml`."""


def environment_files(cwd: Path | None = None) -> tuple[Path, ...]:
    """Where `env.toml` is looked for, in order of precedence; the files need not exist.

    The one that NEMOTRON_ENV_FILE names, else the nearest of the working directory and the folders above it; then the
    user's own.
    """
    base = os.environ.get("XDG_CONFIG_HOME")
    user = Path(base) if base else Path.home() / ".config"
    named = os.environ.get(ENVIRONMENT_VARIABLE)
    first = Path(named).expanduser() if named else _nearest(cwd or Path.cwd())
    return (first, user / "nemotron_steps" / ENVIRONMENT_FILE)


def _nearest(cwd: Path) -> Path:
    """`env.toml` of a folder or of the nearest one above that has one; the folder's own where none has."""
    for folder in (cwd, *cwd.parents):
        file = folder / ENVIRONMENT_FILE
        if file.is_file() and (folder == cwd or not _anybodys(folder, file)):
            return file
    return cwd / ENVIRONMENT_FILE


def _anybodys(folder: Path, file: Path) -> bool:
    """Whether anybody may have put a file there, as in /tmp: its profiles run commands, so it must be the user's."""
    return bool(folder.stat().st_mode & stat.S_IWOTH) and file.stat().st_uid not in (os.geteuid(), 0)


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Where what can be made again is kept: `$XDG_CACHE_HOME/nemotron_steps`, or `~/.cache/nemotron_steps`.

    Args:
        environ: where XDG_CACHE_HOME is read; None: the process environment.
    """
    base = (os.environ if environ is None else environ).get("XDG_CACHE_HOME")
    return Path(base or os.path.expanduser("~/.cache"), "nemotron_steps")
