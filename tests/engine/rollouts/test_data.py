"""Prompts: read from their file when they are needed, in an order that does not depend on how they are held."""

import json
import os
import random
from pathlib import Path

import pytest

from nemotron_steps.engine.rollouts.data import PromptRow, PromptStream, read_rows
from nemotron_steps.errors import DataError


def write(file: Path, count: int, *, blank: int = 0) -> Path:
    with file.open("w") as out:
        for number in range(count):
            out.write(json.dumps({"n": number, "text": f"größe {number}"}) + "\n" + "\n" * blank)
    return file


def test_rows_are_those_of_the_file(tmp_path):
    rows = read_rows(write(tmp_path / "a.jsonl", 5, blank=1))
    expected = [PromptRow(n, {"n": n, "text": f"größe {n}"}, f"{tmp_path}/a.jsonl:{2 * n + 1}") for n in range(5)]
    assert list(rows) == expected and len(rows) == 5
    assert [rows[3], rows[-1]] == [expected[3], expected[4]] and rows[1:4] == expected[1:4]
    with pytest.raises(IndexError):
        rows[5]


def test_the_order_is_that_of_a_shuffled_list(tmp_path):
    rows = read_rows(write(tmp_path / "a.jsonl", 50))
    stream = PromptStream(rows, batch_size=10, max_epochs=2, seed=7, shuffle=True)
    served = [row.index for batch in stream for row in batch]
    expected = []
    for epoch in range(2):
        order = list(range(50))
        random.Random(f"7:{epoch}").shuffle(order)
        expected += order
    assert served == expected
    assert [stream.at(place).index for place in (0, 49, 50, 99)] == [expected[place] for place in (0, 49, 50, 99)]


@pytest.mark.parametrize(("rows", "time"), [(4, 9), (3, 1), (4, 1)], ids=["size", "time", "both"])
def test_a_file_changed_during_the_run_is_told(tmp_path, rows, time):
    file = write(tmp_path / "a.jsonl", 3)
    os.utime(file, (9, 9))
    count, rows = rows, read_rows(file)
    write(file, count)
    os.utime(file, (time, time))
    for use in (lambda: rows[0], lambda: list(rows)):
        with pytest.raises(DataError, match="changed"):
            use()


@pytest.mark.parametrize(("rows", "left"), [(8, 0), (10, 2), (11, 3)])
def test_what_does_not_fill_a_batch_is_left_out_of_an_epoch(tmp_path, rows, left):
    stream = PromptStream(
        read_rows(write(tmp_path / "a.jsonl", rows)), batch_size=4, max_epochs=3, seed=1, shuffle=False
    )
    served = [[row.index for row in batch] for batch in stream]
    assert served == [[0, 1, 2, 3], [4, 5, 6, 7]] * 3 and rows - 8 == left
    assert (stream.num_rows, stream.num_positions) == (rows, 24)
    assert [stream.num_steps(most) for most in (5, 6, 7)] == [5, 6, 6]
    assert [stream.at(place).index for place in (0, 7, 8, 23)] == [0, 7, 0, 7]


def test_a_resumed_stream_serves_what_the_cut_off_one_had_not(tmp_path):
    rows = read_rows(write(tmp_path / "a.jsonl", 7))

    def stream(seed=3):
        return PromptStream(rows, batch_size=3, max_epochs=2, seed=seed, shuffle=True)

    whole = [[row.index for row in batch] for batch in stream()]
    assert len(whole) == 4 and whole[:2] != whole[2:] and whole != [[r.index for r in b] for b in stream(4)]
    for served in range(5):
        cut = stream()
        for _ in zip(range(served), cut, strict=False):
            pass
        back = stream()
        back.load_state_dict(json.loads(json.dumps(cut.state_dict())))
        assert [[row.index for row in batch] for batch in back] == whole[served:]


def test_files_without_rows_and_absent_ones_are_told(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n \n")
    with pytest.raises(DataError, match="no rows"):
        read_rows(tmp_path / "empty.jsonl")
    with pytest.raises(DataError, match="no such prompt file"):
        read_rows(tmp_path / "absent.jsonl")
