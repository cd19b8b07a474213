"""JSON Lines: what is a row, and what is said of a line that is none."""

import math
from pathlib import Path

import pytest

from nemotron_steps.errors import DataError
from nemotron_steps.rows.lines import check_file, parse_row, read_rows


def test_a_line_is_strict_json_or_what_python_reads_beside_and_blank_ones_are_none(tmp_path: Path) -> None:
    assert parse_row(b'{"a": 1}', "f:1") == ({"a": 1}, True)
    row, strict = parse_row(b'{"a": NaN}', "f:1")
    assert math.isnan(row["a"]) and not strict
    (tmp_path / "rows.jsonl").write_bytes(b'\n{"a": 1}\n  \n{"a": Infinity}\n')
    assert [number for number, _ in read_rows(tmp_path / "rows.jsonl")] == [2, 4]
    assert check_file(tmp_path / "rows.jsonl", lambda row, where: None) == 2


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"a": "\xff"}\n', "the line is not JSON"),
        (b"[" * 100_000 + b"\n", "the line is not JSON"),
        (b'{"a": 1', "the last line is cut off"),
        (b'{"a": 1\n', "the line is not JSON"),
        (b"3\n", "the row is not a JSON object"),
        (b'{"a": "\xff', "the last line is cut off"),
    ],
)
def test_a_line_that_is_no_row_is_told_by_what_is_wrong_with_it(line: bytes, said: str) -> None:
    with pytest.raises(DataError, match=said) as caught:
        parse_row(line, "rows.jsonl:7")
    assert caught.value.where == "rows.jsonl:7" and caught.value.hints
    assert len(str(caught.value.found)) < 200


def test_the_hints_for_a_line_that_is_no_json_take_it_out_or_show_it() -> None:
    with pytest.raises(DataError) as caught:
        parse_row(b"x\n", "rows.jsonl:7")
    assert [hint.split()[:2] for hint in caught.value.hints] == [["sed", "-i.bak"], ["sed", "-n"]]
    assert str(caught.value.found).startswith("x (")
