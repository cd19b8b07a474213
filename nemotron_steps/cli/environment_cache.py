"""What `steps env show` tells of a built-in environment, from a cache: its class imports pydantic, a tenth of a second.

An entry holds the times and sizes of every file of this package that was imported to make it; if one differs, it is
made again. What a plug-in brings is always read anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from nemotron_steps.config.json_cache import read_json, write_json
from nemotron_steps.config.locations import cache_folder
from nemotron_steps.environments.agents import AGENTS
from nemotron_steps.environments.catalog import Described, Listed, Setting, described
from nemotron_steps.environments.registry import BUILT_IN

_PACKAGE = __name__.partition(".")[0]


def cached_description(name: str) -> Described:
    """As catalog.described, with settings and presets as JSON has them."""
    environment = AGENTS[name].environment if name in AGENTS else name
    if environment not in BUILT_IN:
        return _of_json(as_json(described(name)))
    path = _path(name)
    found = _still_true(read_json(path))
    if found is None:
        entry = {"described": as_json(described(name)), "files": _imported()}
        write_json(path, entry)
        found = _of_json(entry["described"])
    return found


def as_json(found: Described | Listed) -> dict[str, Any]:
    """As JSON has it."""
    from dataclasses import asdict

    fields: dict[str, Any] = json.loads(json.dumps(asdict(found), default=_plain))
    return fields


def _of_json(fields: dict[str, Any]) -> Described:
    return Described(**{**fields, "settings": tuple(Setting(**each) for each in fields["settings"])})


def _plain(value: Any) -> Any:
    """A default as JSON has it; settings within settings are models."""
    dump = getattr(value, "model_dump", None)
    return dump() if dump is not None else value if isinstance(value, str | int | float | bool | None) else str(value)


def _path(name: str) -> Path:
    made_by = json.dumps([sys.executable, sys.version, __file__])
    return cache_folder() / "environments" / f"{name}-{hashlib.sha256(made_by.encode()).hexdigest()[:16]}.json"


def _imported() -> dict[str, list[int]]:
    """Time and size of every file of this package that this process has imported."""
    ours = (module for name, module in sys.modules.copy().items() if name.partition(".")[0] == _PACKAGE)
    files = sorted({file for module in ours if (file := getattr(module, "__file__", None))})
    return {file: _stamp(file) for file in files}


def _stamp(file: str) -> list[int]:
    seen = os.stat(file)
    return [seen.st_mtime_ns, seen.st_size]


def _still_true(entry: Any) -> Described | None:
    """The description of an entry, if it is one and the files are as they were."""
    try:
        if all(_stamp(file) == stamp for file, stamp in entry["files"].items()):
            return _of_json(entry["described"])
    except (OSError, KeyError, TypeError, AttributeError):  # a file is gone, or it is none of ours
        return None
    return None
