"""The public blend file: the data sets of a blend and their weights, as JSON."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from pydantic import Field, PositiveFloat, ValidationError

from nemotron_steps.config.schema.base import Section
from nemotron_steps.errors import DataError
from nemotron_steps.steps.data_prep.blends.hub import hub_name

_SHAPE = '{"datasets": [{"name": "math", "path": "hf://ORG/NAME or a path", "split": "train", "weight": 1.0}]}'


class BlendEntry(Section):
    """One data set of a blend."""

    name: str = Field(min_length=1)
    path: str = Field(min_length=1)
    """A source, as `input_path`; a relative path is relative to the blend file."""
    split: str | None = None
    subset: str | None = None
    weight: PositiveFloat = 1.0
    """1 takes every row once, less that share of them, more repeats rows in training."""
    text_field: str | None = None
    """What a blend for pre-training tokenises; rows of chats and prompts are whole."""


class _BlendFile(Section):
    datasets: tuple[BlendEntry, ...] = Field(min_length=1)


def read_blend(path: str) -> list[BlendEntry]:
    """The data sets of a blend file, in its order.

    Raises:
        DataError: it is not there, is no blend file, or two data sets have one name.
    """
    file = Path(path).expanduser()
    try:
        blend = _BlendFile.model_validate_json(file.read_bytes())
    except OSError as error:
        raise DataError(
            "the blend file cannot be read",
            where=f"blend_path = {path}",
            found=error.strerror,
            expected=_SHAPE,
            hints=("blend_path=FILE.json", "blend_path=null input_path=PATH"),
        ) from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise DataError(
            "the file is not a blend file",
            where=f"{path}{f' key {place}' if place else ''}",
            expected=_SHAPE,
            found=first["msg"],
            hints=(f"python -m json.tool {path}",) if first["type"] == "json_invalid" else (),
        ) from error
    names = [entry.name for entry in blend.datasets]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise DataError(
            "two data sets of the blend have one name",
            where=path,
            found=json.dumps(twice),
            hints=(f"grep -n {shlex.quote(json.dumps(twice))} {shlex.quote(path)}   # where it stands",),
        )
    return [entry.model_copy(update={"path": _resolved(entry.path, file.parent)}) for entry in blend.datasets]


def _resolved(path: str, folder: Path) -> str:
    if "://" in path or Path(path).expanduser().is_absolute():
        return path
    beside = folder / path
    return path if hub_name(path) is not None and not beside.exists() else str(beside)
