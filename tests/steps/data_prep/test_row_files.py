"""Which rows a step goes on with."""

from __future__ import annotations

from typing import Any

import pytest

from nemotron_steps.errors import DataError
from nemotron_steps.runs.tracker import Tracker
from nemotron_steps.steps.data_prep.row_files import keep_usable

ROWS = [(f"f.jsonl:{number}", {"number": number}) for number in range(1, 11)]


def kept(refused: set[int], share: float) -> tuple[list[int], list[str]]:
    """The rows left of ten, and the places of those reported."""

    def check(where: str, row: dict[str, Any]) -> None:
        if row["number"] in refused:
            raise DataError("a bad row", where=where, expected="a good one", found="none", hints=("mend it",))

    records: list[dict[str, Any]] = []
    rows = keep_usable(ROWS, check, max_refused_share=share, tracker=Tracker("test", None, records.append))
    events = [record["fields"]["where"] for record in records if record.get("name") == "row_refused"]
    return [row["number"] for row in rows], events


def test_a_tolerated_share_is_left_out_and_each_is_reported() -> None:
    assert kept(set(), 0.0) == ([*range(1, 11)], [])
    assert kept({2, 5, 9}, 0.3) == ([1, 3, 4, 6, 7, 8, 10], ["f.jsonl:2", "f.jsonl:5", "f.jsonl:9"])


def test_more_than_that_is_refused_with_the_first_of_them() -> None:
    with pytest.raises(DataError, match="3 of 10 rows cannot be used; the first: a bad row") as caught:
        kept({2, 5, 9}, 0.29)
    assert (caught.value.where, caught.value.found) == ("f.jsonl:2", "30.0%")
    with pytest.raises(DataError, match="1 of 10 rows cannot be used") as caught:
        kept({7}, 0.0)
    assert (caught.value.where, caught.value.expected, caught.value.found) == ("f.jsonl:7", "a good one", "none")
    assert caught.value.hints[0] == "mend it"
