"""Rows for both graders: NeMo-Gym's own examples, and made-up ones of their shape."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read(*paths: Path) -> list[dict[str, Any]]:
    """Rows of JSON Lines files."""
    return [json.loads(line) for path in paths for line in path.read_text().splitlines() if line.strip()]


def asking(text: str, /, **fields: Any) -> dict[str, Any]:
    """A row with one user message."""
    return {"responses_create_params": {"input": [{"role": "user", "content": text}]}, **fields}
