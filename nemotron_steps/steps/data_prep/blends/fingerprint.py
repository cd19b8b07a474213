"""What identifies the data that a config names, for the cache key of its step: files, and stamps of what is elsewhere.

A name of the hub stands for itself: what was prepared of it stays so until `--force`, or another revision is named.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemotron_steps.errors import StepsError
from nemotron_steps.steps.data_prep.blends.blend_file import read_blend
from nemotron_steps.steps.data_prep.blends.hub import hub_name
from nemotron_steps.steps.data_prep.blends.sources import data_files


def of_config(values: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Of `input_path`, `blend_path` with all that it names, and the sources of placeholders, by key."""
    mirror = values.get("mirror")
    paths = {"input_path": values.get("input_path")}
    paths |= {f"placeholders.{name}": path for name, path in (values.get("placeholders") or {}).items()}
    found = {key: _of_path(path, mirror) for key, path in paths.items() if path is not None}
    if values.get("blend_path") is not None:
        try:
            blend = read_blend(values["blend_path"])
        except StepsError as error:  # told when the step runs
            return {**found, "blend_path": [error.what]}
        entries = [(split, each) for split, each_of in blend.items() for each in each_of]
        found["blend_path"] = [[split, each.model_dump(), *_of_path(each.path, mirror)] for split, each in entries]
    return found if mirror is None else {**found, "mirror": [mirror]}


def _of_path(path: str, mirror: str | None) -> list[Any]:
    if mirror is None and not Path(path).expanduser().exists() and hub_name(path) is not None:
        return [path]
    try:
        files = data_files(path, key="", mirror=mirror)
    except StepsError as error:  # told when the step runs
        return [error.what]
    return [each for file in files for each in (file.name, file.stamp if "://" in file.path else Path(file.path))]
