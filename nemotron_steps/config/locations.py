"""Where the user's own files are: env.toml, and the folder of caches."""

import contextlib
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ENVIRONMENT_FILE = "env.toml"
ENVIRONMENT_VARIABLE = "NEMOTRON_ENV_FILE"
"""Names the file to read in place of the nearest `env.toml`."""


def environment_files(cwd: Path | None = None) -> tuple[Path, ...]:
    """Where `env.toml` is looked for, in order of precedence; the files need not exist: the one that NEMOTRON_ENV_FILE
    names, else the nearest of the working directory and the folders above it; then the user's own."""
    base = os.environ.get("XDG_CONFIG_HOME")
    user = Path(base) if base else Path.home() / ".config"
    named = os.environ.get(ENVIRONMENT_VARIABLE)
    first = Path(named).expanduser() if named else _nearest(cwd or Path.cwd())
    return (first, user / "nemotron_steps" / ENVIRONMENT_FILE)


def _nearest(cwd: Path) -> Path:
    """`env.toml` of a folder or of the nearest one above that has one; the folder's own where none has."""
    for folder in (cwd, *cwd.parents):
        file = folder / ENVIRONMENT_FILE
        if not file.is_file():
            continue
        # Anybody may have put a file into /tmp: its profiles run commands, so it must be the user's.
        anybodys = folder.stat().st_mode & stat.S_IWOTH and file.stat().st_uid not in (os.geteuid(), 0)
        if folder == cwd or not anybodys:
            return file
    return cwd / ENVIRONMENT_FILE


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Where what can be made again is kept: `$XDG_CACHE_HOME/nemotron_steps`, or `~/.cache/nemotron_steps`."""
    base = (os.environ if environ is None else environ).get("XDG_CACHE_HOME")
    return Path(base or os.path.expanduser("~/.cache"), "nemotron_steps")


def read_json(path: Path) -> Any:
    """What a file holds; None where it is missing or no JSON."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def write_json(path: Path, data: Any) -> None:
    """Replace a file in one step, and make its folder. ValueError or TypeError for what JSON has no form for."""
    text = json.dumps(data, separators=(",", ":"))
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


_LAUNCHER = re.compile(
    r"((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE))|NODE_RANK|ROLE_NAME|MASTER_(ADDR|PORT)"
    r"|(TORCHELASTIC|OMPI_COMM_WORLD|MV2_COMM_WORLD|PMI|PMIX)_.*|MPI_LOCAL(RANKID|NRANKS)"
)
"""Names of the variables by which torchrun and MPI tell a process which of several ranks it is."""


def of_launcher() -> dict[str, None]:
    """Those of a launcher that this process inherited, for `variables_set`: a run makes its own groups of ranks."""
    return {name: None for name in os.environ if _LAUNCHER.fullmatch(name)}


@contextlib.contextmanager
def variables_set(values: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables within, or unset them (None); afterwards each is what it was before, or gone."""
    before = {name: os.environ.get(name) for name in values}
    _set(values)
    try:
        yield
    finally:
        _set(before)


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
