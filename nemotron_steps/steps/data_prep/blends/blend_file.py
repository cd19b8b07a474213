"""The public blend file: the data sets of a blend and their weights, as JSON, of the whole or of each split."""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import AliasChoices, Field, PositiveFloat, ValidationError

from nemotron_steps.config.schema.base import Section
from nemotron_steps.errors import DataError, StepsError
from nemotron_steps.steps.data_prep.blends.sources import data_files, hub_name
from nemotron_steps.steps.data_prep.blends.splits import Split

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


class _BlendFile(Section):
    datasets: tuple[BlendEntry, ...] | None = Field(None, min_length=1)
    train: tuple[BlendEntry, ...] | None = Field(None, min_length=1)
    valid: tuple[BlendEntry, ...] | None = Field(
        None, min_length=1, validation_alias=AliasChoices("valid", "validation")
    )
    test: tuple[BlendEntry, ...] | None = Field(None, min_length=1)


Blend = dict[Split | None, list[BlendEntry]]
"""The data sets of each split, or under None those whose rows are yet to be split."""


def read_blend(path: str) -> Blend:
    """The data sets of a blend file, in its order."""
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
    given: dict[Split | None, tuple[BlendEntry, ...] | None] = {
        None: blend.datasets,
        "train": blend.train,
        "validation": blend.valid,
        "heldout": blend.test,
    }
    lists = {split: entries for split, entries in given.items() if entries is not None}
    if (None in lists) == ("train" in lists) or (None in lists and len(lists) > 1):
        raise DataError(
            "the file is not a blend file",
            where=path,
            expected=f'{_SHAPE}, or such lists under "train", "valid" and "test"',
            found=", ".join(sorted(blend.model_fields_set)) or "no list of data sets",
            hints=(f"python -m json.tool {path}",),
        )
    found: Blend = {}
    for split, entries in lists.items():
        names = [entry.name for entry in entries]
        for name in names:
            if names.count(name) > 1:
                raise DataError(
                    "two data sets of the blend have one name",
                    where=path,
                    found=json.dumps(name),
                    hints=(f"grep -n {shlex.quote(json.dumps(name))} {shlex.quote(path)}   # where it stands",),
                )
        found[split] = []
        for entry in entries:
            named, beside = entry.path, file.parent / entry.path
            on_hub = hub_name(named) is not None and not beside.exists()
            elsewhere = "://" in named or Path(named).expanduser().is_absolute() or on_hub
            found[split].append(entry if elsewhere else entry.model_copy(update={"path": str(beside)}))
    return found


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
