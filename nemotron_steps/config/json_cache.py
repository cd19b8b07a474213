"""JSON that can be made again, in files of the cache folder: one that cannot be read or written costs only time."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any


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
