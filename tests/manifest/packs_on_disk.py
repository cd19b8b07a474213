"""Packs written to a folder for a test."""

from collections.abc import Mapping
from pathlib import Path

from nemotron_steps.manifest.packs import PackSearch, open_pack
from nemotron_steps.manifest.registry import Registry, load_registry

STEP = """[step]
id = "{id}"
category = "demo"

[[consumes]]
type = "{consumes}"

[[produces]]
type = "{produces}"
"""


def write_files(root: Path, files: Mapping[str, str]) -> Path:
    """Write relative path → text; returns root."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def read_packs(*roots: Path) -> Registry:
    """A registry of just these packs."""
    return load_registry(PackSearch(tuple(open_pack(root, root.name, "test") for root in roots)))


def step_text(step_id: str, consumes: str = "a", produces: str = "b") -> str:
    """A minimal step file."""
    return STEP.format(id=step_id, consumes=consumes, produces=produces)
