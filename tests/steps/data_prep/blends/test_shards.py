"""Which shards of an earlier attempt are of the same part, and taken in the same way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.steps.data_prep.blends.formats import parts_of
from nemotron_steps.steps.data_prep.blends.shards import ShardTask, finished, make_shard
from nemotron_steps.steps.data_prep.blends.sources import data_files
from tests.steps.data_prep.blends.conftest import Marked, write_lines

ROWS: list[Any] = [{"n": 1}, {"bad": 2}, b"", {"twice": True}, {"n": 4}]


@pytest.fixture
def task(tmp_path: Path) -> ShardTask:
    (file,) = data_files(str(write_lines(tmp_path / "a.jsonl", ROWS)), key="")
    (tmp_path / "out").mkdir()
    return ShardTask("s", str(tmp_path / "out"), parts_of(file)[0], None, 1.0, "seed")


@pytest.mark.parametrize(
    "change",
    [
        lambda task: replace(task, limit=3),
        lambda task: replace(task, share=0.5),
        lambda task: replace(task, part=replace(task.part, end=task.part.end - 1)),
        lambda task: replace(task, part=replace(task.part, file=replace(task.part.file, stamp="other"))),
    ],
)
def test_a_shard_of_another_part_or_of_other_rows_of_it_is_made_again(
    task: ShardTask, change: Callable[[ShardTask], ShardTask]
) -> None:
    make_shard(task, Marked()())
    assert finished(task) is not None and finished(change(task)) is None
