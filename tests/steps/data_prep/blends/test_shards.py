"""Which shards of an earlier attempt are of the same part, and taken in the same way."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.errors import DataError
from nemotron_steps.steps.data_prep.blends import shards
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


def test_a_finished_shard_is_read_as_it_was_made(task: ShardTask) -> None:
    made = make_shard(task, Marked().function())
    found = finished(task)
    assert found is not None and found == replace(made, first_refusal=found.first_refusal)
    assert (found.lines, found.accounts.read, found.accounts.written, found.accounts.added) == (5, 4, 4, 1)
    error = found.first_refusal
    assert isinstance(error, DataError) and made.first_refusal is not None
    assert (error.what, error.where, error.hints) == ("bad because of 2", made.first_refusal.where, ())
    assert [json.loads(line) for line in found.refusals.read_text().splitlines()] == [
        {"file": "a.jsonl", "line": 2, "reason": "bad because of 2", "field": "bad", "found": "2"}
    ]


@pytest.mark.parametrize(
    "change",
    [
        lambda task: replace(task, limit=3),
        lambda task: replace(task, share=0.5),
        lambda task: replace(task, part=replace(task.part, start=1)),
        lambda task: replace(task, part=replace(task.part, end=task.part.end - 1)),
        lambda task: replace(task, part=replace(task.part, file=replace(task.part.file, stamp="other"))),
        lambda task: replace(task, part=replace(task.part, file=replace(task.part.file, path="/other"))),
        lambda task: replace(task, name="other"),
    ],
)
def test_a_shard_of_another_part_or_of_other_rows_of_it_is_made_again(
    task: ShardTask, change: Callable[[ShardTask], ShardTask]
) -> None:
    make_shard(task, Marked().function())
    assert finished(task) is not None and finished(change(task)) is None


def test_a_shard_without_its_rows_or_of_another_format_is_made_again(
    task: ShardTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_shard(task, Marked().function())
    with monkeypatch.context() as patch:
        patch.setattr(shards, "_FORMAT", 2)
        assert finished(task) is None
    made.rows.unlink()
    assert finished(task) is None


def test_a_shard_has_the_first_rows_up_to_its_limit_and_no_refusals_of_an_earlier_one(task: ShardTask) -> None:
    make_shard(task, Marked().function())
    few = make_shard(replace(task, limit=1), Marked().function())
    assert few.rows.read_bytes() == b'{"n": 1}\n' and not few.refusals.exists()
    assert (few.accounts.read, few.accounts.refused) == (1, {})


def test_the_rows_that_a_share_takes_differ_from_one_data_set_to_another(tmp_path: Path) -> None:
    (file,) = data_files(str(write_lines(tmp_path / "a.jsonl", [{"n": n} for n in range(200)])), key="")
    taken = []
    for seed in ("one", "one", "two"):
        task = ShardTask("s", str(tmp_path), parts_of(file)[0], None, 0.5, seed)
        shard = make_shard(task, Marked().function())
        assert shard.accounts.num_left_out == 200 - shard.accounts.written and 70 < shard.accounts.written < 130
        taken.append(shard.rows.read_bytes())
    assert taken[0] == taken[1] != taken[2]
