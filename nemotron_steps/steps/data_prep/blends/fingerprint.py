"""What identifies the data that a config names, for the cache key of its step: sizes and times of files, no content.

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


def of_config(values: Mapping[str, Any]) -> list[Any]:
    """Fingerprints of `input_path`, `blend_path` with all that it names, and the sources of placeholders."""
    mirror = values.get("mirror")
    paths = [values.get("input_path")]
    paths += (values.get("placeholders") or {}).values()
    found: list[Any] = []
    if values.get("blend_path") is not None:
        try:
            blend = read_blend(values["blend_path"])
        except StepsError as error:  # told when the step runs
            return [error.what]
        found.append([(split, each.model_dump()) for split, entries in blend.items() for each in entries])
        paths += [each.path for entries in blend.values() for each in entries]
    return [*found, *(_of_path(path, mirror) for path in paths if path is not None)]


def _of_path(path: str, mirror: str | None) -> Any:
    if mirror is None and not Path(path).expanduser().exists() and hub_name(path) is not None:
        return path
    try:
        files = data_files(path, key="", mirror=mirror)
    except StepsError as error:  # told when the step runs
        return error.what
    return [(file.name, file.stamp) for file in files]
