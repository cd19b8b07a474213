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
from nemotron_steps.errors import DataError, UnsupportedError
from nemotron_steps.rows.layouts import has_pair, prompt_layout, without_padding

_CORRECT = '{"prompt": "What is 1 + 1?", "answer": "2"}'


def data_reference(dataset: Any, folder: Path, *, argument: str = "dataset") -> str:
    """What a plan takes as the input for a data set.

    Args:
        dataset: a path, a reference or an artifact, as it is; or rows: a list (or any iterable) of mappings,
            a `datasets.Dataset`, a pandas or polars DataFrame, or another table that exports Arrow data.
        folder: gets the file.
        argument: what the caller's argument is called, for messages.

    Raises DataError for what holds no rows, or a row that JSON has no form for.
    """
    if isinstance(dataset, Artifact):
        return dataset.ref
    if isinstance(dataset, str | os.PathLike):
        return os.fspath(dataset)
    if isinstance(dataset, Mapping):
        names = ", ".join(map(str, dataset))
        raise DataError(
            "one data set is wanted, and this is a mapping of several, or a single row",
            where=argument,
            expected="rows, or a path",
            found=f"{type(dataset).__name__} of {names[:120]}",
            hints=tuple(f"{argument}={argument}[{name!r}]" for name in list(dataset)[:1]),
        )
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    count = 0
    with NamedTemporaryFile("wb", dir=folder, suffix=".partial", delete=False) as file:
        try:
            for count, row in enumerate(_rows(dataset, argument), start=1):
                line = _line(row, count, argument)
                digest.update(line)
                file.write(line)
            if not count:
                raise DataError("the data set has no rows", where=argument, expected=f"a row like {_CORRECT}")
            file.close()
            path = folder / f"{digest.hexdigest()[:16]}.jsonl"
            os.replace(file.name, path)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(file.name)
            raise
    return str(path)


def _rows(dataset: Any, argument: str) -> Iterator[Any]:
    """The rows of anything that has some."""
    if hasattr(dataset, "itertuples") and hasattr(dataset, "columns"):  # pandas
        names = [str(name) for name in dataset.columns]
        for values in dataset.itertuples(index=False, name=None):
            yield without_padding(dict(zip(names, values, strict=True)))
    elif hasattr(dataset, "__arrow_c_stream__"):  # polars, pyarrow, duckdb
        yield from _arrow_rows(dataset, argument)
    elif isinstance(dataset, Iterable):
        yield from map(without_padding, dataset) if hasattr(dataset, "features") else dataset  # of `datasets`
    else:
        raise DataError(
            "this holds no rows",
            where=argument,
            expected="a list of rows, a datasets.Dataset, a DataFrame, or the path of a file or folder",
            found=type(dataset).__name__,
            hints=(f"{argument}={argument}.collect()",) if callable(getattr(dataset, "collect", None)) else (),
        )


def _arrow_rows(table: Any, argument: str) -> Iterator[dict[str, Any]]:
    """The rows of a table by Arrow's PyCapsule interface, one batch in memory at a time."""
    try:
        from pyarrow import RecordBatchReader
    except ImportError as error:
        raise UnsupportedError(
            f"a {type(table).__module__}.{type(table).__name__} is read by pyarrow, which is not installed",
            where=argument,
            hints=("pip install 'nemotron-steps[data]'",),
        ) from error
    for batch in RecordBatchReader.from_stream(table):
        yield from map(without_padding, batch.to_pylist())


def _line(row: Any, number: int, argument: str) -> bytes:
    if not isinstance(row, Mapping):
        raise DataError(
            "a row is a mapping of columns",
            where=f"{argument}, row {number}",
            expected=f"a row like {_CORRECT}",
            found=f"{type(row).__name__} {str(row)[:80]!r}",
            hints=(f'{argument}=[{{"prompt": text}} for text in {argument}]',) if isinstance(row, str) else (),
        )
    if number == 1 and not prompt_layout(row)[1] and not has_pair(row):
        texts = sorted(
            (name for name, value in row.items() if isinstance(value, str)), key=lambda name: -len(row[name])
        )
        raise DataError(
            "nothing in the rows is a prompt",
            where=f"{argument}, row 1",
            expected=f"a row like {_CORRECT}",
            found="columns " + ", ".join(map(str, row))[:200],
            hints=[f'{argument}=[{{**row, "prompt": row["{name}"]}} for row in {argument}]' for name in texts[:2]],
        )
    cells = {str(name): _cell(value, f"{argument}, row {number}, column {name}") for name, value in row.items()}
    # A text may hold half of a surrogate pair, which JSON has as an escape.
    return json.dumps(cells, ensure_ascii=False, allow_nan=False).encode(errors="backslashreplace") + b"\n"


def _cell(value: Any, where: str) -> Any:
    """A value as JSON has it; a missing number or date of a table is null."""
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _cell(item, where) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_cell(item, where) for item in value]
    if callable(getattr(value, "model_dump", None)):  # pydantic, as OpenAI's messages
        return _cell(value.model_dump(), where)
    if callable(getattr(value, "tolist", None)):  # numpy
        return _cell(value.tolist(), where)
    if type(value).__name__ in ("NAType", "NaTType"):  # pandas; its missing date has an isoformat
        return None
    if callable(getattr(value, "isoformat", None)):  # dates
        return str(value.isoformat())
    raise DataError(
        "the value has no form in JSON",
        where=where,
        expected="texts, numbers, lists and mappings of them",
        found=f"{type(value).__module__}.{type(value).__qualname__}",
        hints=("leave the column out of the rows",),
    )
