"""A data set in memory → a file of JSON Lines in the home, named by its content, that a plan takes as an input.

What a row looks like is not looked at here: the import of prompts knows the layouts (docs/data.md).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from nemotron_steps.artifacts.models import Artifact
from nemotron_steps.artifacts.prompt_data import has_prompt
from nemotron_steps.errors import DataError

_CORRECT = '{"prompt": "What is 1 + 1?", "answer": "2"}'


def data_reference(dataset: Any, folder: Path) -> str:
    """What a plan takes as the input for a data set.

    Args:
        dataset: a path, a reference or an artifact, as it is; or rows: a list (or any iterable) of mappings,
            a `datasets.Dataset`, a pandas or polars DataFrame.
        folder: gets the file.

    Raises DataError for what holds no rows, or a row that JSON has no form for.
    """
    if isinstance(dataset, Artifact):
        return dataset.ref
    if isinstance(dataset, str | os.PathLike):
        return os.fspath(dataset)
    if isinstance(dataset, Mapping):
        names = ", ".join(map(str, dataset))
        raise DataError(
            "one data set is trained on, and this is a mapping of several, or a single row",
            where="dataset",
            expected="rows, or a path",
            found=f"{type(dataset).__name__} of {names[:120]}",
            hints=tuple(f"dataset=dataset[{name!r}]" for name in list(dataset)[:1]),
        )
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    count = 0
    with NamedTemporaryFile("wb", dir=folder, suffix=".partial", delete=False) as file:
        try:
            for count, row in enumerate(_rows(dataset), start=1):
                line = _line(row, count)
                digest.update(line)
                file.write(line)
            if not count:
                raise DataError("the data set has no rows", where="dataset", expected=f"a row like {_CORRECT}")
            file.close()
            path = folder / f"{digest.hexdigest()[:16]}.jsonl"
            os.replace(file.name, path)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(file.name)
            raise
    return str(path)


def _rows(dataset: Any) -> Iterator[Any]:
    """The rows of anything that has some."""
    if hasattr(dataset, "to_dicts"):  # polars
        yield from dataset.to_dicts()
    elif hasattr(dataset, "itertuples") and hasattr(dataset, "columns"):  # pandas
        names = [str(name) for name in dataset.columns]
        for values in dataset.itertuples(index=False, name=None):
            yield dict(zip(names, values, strict=True))
    elif isinstance(dataset, Iterable):
        yield from dataset
    else:
        raise DataError(
            "this holds no rows",
            where="dataset",
            expected="a list of rows, a datasets.Dataset, a DataFrame, or the path of a file or folder",
            found=type(dataset).__name__,
        )


def _line(row: Any, number: int) -> bytes:
    if not isinstance(row, Mapping):
        raise DataError(
            "a row is a mapping of columns",
            where=f"dataset, row {number}",
            expected=f"a row like {_CORRECT}",
            found=f"{type(row).__name__} {str(row)[:80]!r}",
            hints=('dataset=[{"prompt": text} for text in dataset]',) if isinstance(row, str) else (),
        )
    if number == 1 and not has_prompt(row) and "responses_create_params" not in row:
        texts = sorted(
            (name for name, value in row.items() if isinstance(value, str)), key=lambda name: -len(row[name])
        )
        raise DataError(
            "nothing in the rows is a prompt",
            where="dataset, row 1",
            expected=f"a row like {_CORRECT}",
            found="columns " + ", ".join(map(str, row))[:200],
            hints=[f'dataset=[{{**row, "prompt": row["{name}"]}} for row in dataset]' for name in texts[:2]],
        )
    cells = {str(name): _cell(value, f"dataset, row {number}, column {name}") for name, value in row.items()}
    return json.dumps(cells, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def _cell(value: Any, where: str) -> Any:
    """A value as JSON has it; a missing number of a table is null."""
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _cell(item, where) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_cell(item, where) for item in value]
    if callable(getattr(value, "tolist", None)):  # numpy
        return _cell(value.tolist(), where)
    if callable(getattr(value, "isoformat", None)):  # dates
        return str(value.isoformat())
    if type(value).__name__ in ("NAType", "NaTType"):  # pandas
        return None
    raise DataError(
        "the value has no form in JSON",
        where=where,
        expected="texts, numbers, lists and mappings of them",
        found=f"{type(value).__module__}.{type(value).__qualname__}",
        hints=("leave the column out of the rows",),
    )
