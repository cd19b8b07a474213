"""Compositions remembered between commands, so that a dry run need not import Hydra when nothing has changed.

An entry is used only if everything its composition depended on is as it was: the request, the content of every file
read, every file and folder looked for and not found, the environment variables it interpolates, Hydra and this
package. Kept out altogether: compositions that hold a secret, read a variable that is set, or use a resolver whose
result may differ from call to call. A cache that cannot be read or written costs only time.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nemotron_steps.config.json_cache import read_json, write_json
from nemotron_steps.config.locations import cache_folder
from nemotron_steps.config.redaction import redact, redact_text
from nemotron_steps.config.search import Mount

_FORMAT = 1
_KEPT = 128
"""Entries kept; the least recently written go first."""

_RESOLVER = re.compile(r"\$\{\s*([A-Za-z_][\w.]*)\s*:")
_ENVIRONMENT = re.compile(r"\$\{\s*oc\.env\s*:\s*([A-Za-z_]\w*)\s*[,}]")


@dataclass(frozen=True)
class Dependencies:
    """What a composition looked at: files it read, paths that were not there, and paths that were folders.

    `repeatable` is false when a defaults list interpolates, which may depend on more than that.
    """

    files: tuple[Path, ...] = ()
    absent: tuple[Path, ...] = ()
    folders: tuple[Path, ...] = ()
    repeatable: bool = True


def request_key(
    step: str,
    name: str | None,
    mounts: Sequence[Mount],
    overrides: Sequence[str],
    *,
    schema_keys: Sequence[str] | None,
) -> str:
    """The name of the entry for one request, 32 hex digits.

    Args:
        schema_keys: those of the model that the values will become, which may be of a pack's own code; None without.
    """
    request = [
        _FORMAT,
        sys.version,
        step,
        name,
        [[mount.prefix, str(mount.folder), str(mount.file)] for mount in mounts],
        list(overrides),
        schema_keys,
        [_stat(path) for path in _code_files()],
    ]
    return hashlib.sha256(json.dumps(request).encode()).hexdigest()[:32]


def recall(key: str) -> dict[str, Any] | None:
    """The result kept under a key, if all it depended on is unchanged."""
    try:
        entry = read_json(_path(key))
        fresh = (
            all(_digest(Path(path)) == digest for path, digest in entry["files"].items())
            and not any(os.path.exists(path) for path in entry["absent"])
            and all(os.path.isdir(path) for path in entry["folders"])
            and not any(name in os.environ for name in entry["unset"])
        )
        return dict(entry["result"]) if fresh else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def remember(
    key: str,
    result: Mapping[str, Any],
    unresolved: Any,
    overrides: Iterable[str],
    dependencies: Dependencies,
) -> None:
    """Keep a result, if it may be kept.

    Args:
        result: JSON-serialisable; what `recall` will return.
        unresolved: the values before interpolations were resolved.
        overrides: the overrides, which may hold secrets.
        dependencies: what the composition looked at.
    """
    variables = _variables(unresolved)
    if not dependencies.repeatable or variables is None or any(name in os.environ for name in variables):
        return
    if redact(result) != result or any(redact_text(text) != text for text in overrides):
        return
    try:
        if json.loads(json.dumps(result)) != result:
            return
        entry = {
            "files": {str(path): _digest(path) for path in dependencies.files},
            "absent": [str(path) for path in dependencies.absent],
            "folders": [str(path) for path in dependencies.folders],
            "unset": sorted(variables),
            "result": result,
        }
        _forget_oldest(_path(key).parent)
        write_json(_path(key), entry)
    except (OSError, ValueError, TypeError):
        return


def _variables(node: Any) -> set[str] | None:
    """Environment variables that values interpolate; None if a resolver other than oc.env is used."""
    if isinstance(node, Mapping):
        return _merged(_variables(item) for item in node.values())
    if isinstance(node, list | tuple):
        return _merged(_variables(item) for item in node)
    if not isinstance(node, str) or "${" not in node:
        return set()
    names = _ENVIRONMENT.findall(node)
    return set(names) if len(names) == len(_RESOLVER.findall(node)) else None


def set_variables(node: Any, prefix: str = "") -> dict[str, tuple[str, ...]]:
    """Dotted key → environment variables, for every value that interpolates some that are set.

    What `recall` returns has none: a composition that reads a variable that is set is not kept.
    """
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(node, Mapping):
        items = node.items()
    elif isinstance(node, list | tuple):
        items = enumerate(node)
    elif isinstance(node, str) and "${" in node:
        names = tuple(name for name in _ENVIRONMENT.findall(node) if name in os.environ)
        return {prefix[:-1]: names} if names else {}
    return {key: names for at, item in items for key, names in set_variables(item, f"{prefix}{at}.").items()}


def variables_in(node: Any) -> set[str]:
    """The environment variables that a config file's text, or unresolved values, interpolate."""
    if isinstance(node, Mapping):
        return set[str]().union(*(variables_in(item) for item in node.values()))
    if isinstance(node, list | tuple):
        return set[str]().union(*(variables_in(item) for item in node))
    return set(_ENVIRONMENT.findall(node)) if isinstance(node, str) else set()


def _merged(parts: Iterable[set[str] | None]) -> set[str] | None:
    found: set[str] = set()
    for part in parts:
        if part is None:
            return None
        found |= part
    return found


def _code_files() -> list[Path]:
    """What composes: keys of published recipes are renamed on the way, and the schemas say which those are."""
    files = sorted(Path(__file__).parent.rglob("*.py"))
    for package in ("hydra", "omegaconf", "yaml"):
        spec = find_spec(package)
        if spec is not None and spec.origin is not None:
            files.append(Path(spec.origin))
    return files


def _stat(path: Path) -> list[Any]:
    status = path.stat()
    return [str(path), status.st_mtime_ns, status.st_size]


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _path(key: str) -> Path:
    return cache_folder() / "compositions" / f"{key}.json"


def _forget_oldest(folder: Path) -> None:
    """Leave room for one entry."""
    entries = sorted(folder.glob("*.json"), key=lambda entry: entry.stat().st_mtime_ns)
    for stale in entries[: max(0, len(entries) - _KEPT + 1)]:
        stale.unlink(missing_ok=True)
