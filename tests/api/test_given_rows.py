"""Data sets in memory as files: the same rows are the same file, whatever held them."""

import json
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.api.training import data_reference
from nemotron_steps.errors import DataError

ROWS = [{"prompt": "1 + 1?", "answer": "2", "level": 1}, {"prompt": "é", "answer": None, "level": 2}]


def rows_of(dataset: Any, folder: Path) -> list[Any]:
    return [json.loads(line) for line in Path(data_reference(dataset, folder)).read_text().splitlines()]


def test_the_same_rows_are_the_same_file(tmp_path: Path) -> None:
    path = data_reference(ROWS, tmp_path)
    assert rows_of(ROWS, tmp_path) == ROWS
    assert data_reference(iter(ROWS), tmp_path) == path
    assert data_reference([*ROWS, ROWS[0]], tmp_path) != path
    assert data_reference([ROWS[0], {**ROWS[1], "level": 3}], tmp_path) != path
    assert len(list(tmp_path.iterdir())) == 3


def test_data_sets_and_tables_are_rows_and_what_they_miss_is_null(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    pandas = pytest.importorskip("pandas")
    path = data_reference(ROWS, tmp_path)
    assert data_reference(datasets.Dataset.from_list(ROWS), tmp_path) == path
    assert data_reference(pandas.DataFrame(ROWS), tmp_path) == path
    missing = pandas.DataFrame({"prompt": ["x", "y"], "n": [1, None], "t": pandas.to_datetime(["2026-01-02", None])})
    assert rows_of(missing, tmp_path) == [
        {"prompt": "x", "n": 1.0, "t": "2026-01-02T00:00:00"},
        {"prompt": "y", "n": None, "t": None},
    ]


def test_tables_that_export_arrow_are_rows(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")

    class Exporting:
        """What a polars DataFrame has of this: no iteration over rows, only the stream."""

        def __init__(self, rows: list[dict[str, Any]]) -> None:
            self._table = pyarrow.Table.from_pylist(rows)

        def __arrow_c_stream__(self, requested_schema: object = None) -> object:
            return self._table.__arrow_c_stream__(requested_schema)

    path = data_reference(ROWS, tmp_path)
    assert data_reference(Exporting(ROWS), tmp_path) == path
    assert data_reference(pyarrow.Table.from_pylist(ROWS), tmp_path) == path
    assert rows_of(Exporting([{"prompt": "x", "tests": [{"in": 1}]}]), tmp_path) == [
        {"prompt": "x", "tests": [{"in": 1}]}
    ]


@pytest.mark.parametrize(
    ("dataset", "told"),
    [
        ([], "has no rows"),
        (3, "holds no rows"),
        ({"train": ROWS}, "one data set is wanted"),
        (["What is 1 + 1?"], "row 1"),
        ([{"task": "What is 1 + 1?", "key": "2"}], "columns task, key"),
        ([{"prompt": "x"}, {"prompt": object()}], "row 2, column prompt"),
    ],
)
def test_what_holds_no_rows_is_refused_and_leaves_nothing(dataset: Any, told: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as raised:
        data_reference(dataset, tmp_path)
    assert told in str(raised.value)
    assert not list(tmp_path.iterdir())
