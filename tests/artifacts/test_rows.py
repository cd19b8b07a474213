"""The shape of a row of every type: the smallest that is one, and every smallest change that makes it none."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.artifacts import rows
from nemotron_steps.artifacts.rows import (
    A_CHAT,
    Row,
    RowCheck,
    agent_name,
    any_row,
    chat_row,
    check_file,
    packed_row,
    parse_row,
    preference_row,
    prompt_row,
    read_rows,
    shown_fields,
    sniff_row,
)
from nemotron_steps.errors import DataError

USER, ASSISTANT = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
CALLS = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}
PAIR = {"prompt": "2+2?", "chosen": "4", "rejected": "5"}
PACKED = {"input_ids": [0, 5, 6], "loss_mask": [0, 1, 1], "seq_start_id": [0, 2]}


def asking(given: Any) -> Row:
    return {"responses_create_params": {"input": given}}


def without(row: Row, key: str) -> Row:
    return {name: value for name, value in row.items() if name != key}


ROWS: list[tuple[RowCheck, Row]] = [
    (prompt_row, asking("2+2?")),
    (prompt_row, asking([USER])),
    (chat_row, {"messages": [ASSISTANT]}),
    (chat_row, {"messages": [USER, CALLS]}),
    (chat_row, {"messages": [USER, {**CALLS, "content": None}]}),
    (chat_row, {"messages": [{**USER, "content": ""}, ASSISTANT]}),
    (preference_row, PAIR),
    (preference_row, {**PAIR, "prompt": [USER]}),
    (preference_row, {**without(PAIR, "prompt"), "context": "2+2?"}),
    (preference_row, {**PAIR, "chosen": [ASSISTANT], "rejected": {"role": "assistant", "content": "5"}}),
    (packed_row, PACKED),
    (packed_row, {**PACKED, "seq_start_id": [0]}),
]

BROKEN: list[tuple[RowCheck, Row, str]] = [
    (prompt_row, {}, "no `responses_create_params`"),
    (prompt_row, {"responses_create_params": [USER]}, "no `responses_create_params`"),
    (prompt_row, {**asking("x"), "_hf_placeholder": {}}, "placeholder"),
    *((prompt_row, asking(given), "is empty") for given in ("", " \n")),
    *((prompt_row, asking(given), "non-empty list") for given in (None, [], {}, 3)),
    *((prompt_row, asking(given), "not an object") for given in (["x"], [USER, None])),
    *((chat_row, {"messages": given}, "non-empty list") for given in (None, [], {}, "x")),
    *((chat_row, {"messages": [USER, given]}, r"\[1\]` has no `role`") for given in ({}, "x", {"role": 1})),
    *(
        (chat_row, {"messages": [{"role": "assistant", **given}]}, r"\[0\]` has neither")
        for given in ({}, {"content": None}, {"tool_calls": []}, {"content": None, "tool_calls": None})
    ),
    (chat_row, {"messages": [USER]}, "no assistant message"),
    *((preference_row, {**PAIR, "prompt": given}, "no `prompt`") for given in (None, "", 3, {})),
    (preference_row, without(PAIR, "prompt"), "no `prompt`"),
    (preference_row, {**PAIR, "prompt": []}, "no `prompt`"),
    (preference_row, {**PAIR, "prompt": [{"role": "user"}]}, r"`prompt\[0\]`"),
    *((preference_row, {**PAIR, key: given}, f"no `{key}`") for key in ("chosen", "rejected") for given in ("", [], 4)),
    *((preference_row, without(PAIR, key), f"no `{key}`") for key in ("chosen", "rejected")),
    (preference_row, {**PAIR, "rejected": "4"}, "same answer"),
    *((packed_row, {**PACKED, "input_ids": given}, "`input_ids`") for given in (None, [], [0, -1, 2], [0, 1.0, 2])),
    (packed_row, {**PACKED, "input_ids": [0, True, 2]}, "`input_ids`"),
    *((packed_row, {**PACKED, "loss_mask": given}, "`loss_mask`") for given in (None, [0, 1], [0, 1, 1, 1], [0, 1, 2])),
    *((packed_row, {**PACKED, "seq_start_id": given}, "begins with 0") for given in (None, [], [1], [0, "2"])),
    *((packed_row, {**PACKED, "seq_start_id": given}, "must rise") for given in ([0, 0], [0, 2, 1], [0, 3])),
]


@pytest.mark.parametrize(("check", "row"), ROWS)
def test_the_smallest_rows_of_a_type_are_rows_of_it(check: RowCheck, row: Row) -> None:
    assert check(row) is None
    assert check({**row, "more": 1}) is None


@pytest.mark.parametrize(("check", "row", "says"), BROKEN)
def test_a_row_that_lacks_one_thing_is_told_by_it(check: RowCheck, row: Row, says: str) -> None:
    problem = check(row)
    assert problem is not None and re.search(says, problem)


def test_the_type_of_a_row_is_the_finest_whose_fields_it_has() -> None:
    chat = {"messages": [ASSISTANT]}
    assert sniff_row({**asking("x"), **PAIR, **chat}) == "rl_prompts"
    assert sniff_row({**PAIR, **chat}) == "preference_pairs"
    assert sniff_row({**without(PAIR, "rejected"), **chat, **PACKED}) == "sft_chats"
    assert sniff_row(PACKED) == "packed_chats"
    assert {sniff_row(without(PACKED, key)) for key in ("input_ids", "seq_start_id")} == {"training_jsonl"}


def test_a_row_names_its_agent_where_it_has_one() -> None:
    found = [agent_name(row) for row in ({"agent_ref": {"name": "math"}}, {"agent_ref": {}}, {"agent_ref": "math"}, {})]
    assert found == ["math", None, None, None]


def test_the_row_that_is_shown_to_who_has_another_is_right() -> None:
    assert chat_row(json.loads(A_CHAT)) is None


def test_a_line_is_strict_json_or_what_python_reads_beside_and_blank_ones_are_none(tmp_path: Path) -> None:
    assert parse_row(b'{"a": 1}', "f:1") == ({"a": 1}, True)
    row, strict = parse_row(b'{"a": NaN}', "f:1")
    assert math.isnan(row["a"]) and not strict
    (tmp_path / "rows.jsonl").write_bytes(b'\n{"a": 1}\n  \n{"a": Infinity}\n')
    assert [number for number, _ in read_rows(tmp_path / "rows.jsonl")] == [2, 4]
    assert check_file(tmp_path / "rows.jsonl", any_row) == 2


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


def test_a_line_as_long_as_a_row_may_be_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "LONGEST_LINE", 10)
    (tmp_path / "rows.jsonl").write_bytes(b'{"a": 10}\n{"a": 1}\n')
    assert [row for _, row in read_rows(tmp_path / "rows.jsonl")] == [{"a": 10}, {"a": 1}]
    (tmp_path / "rows.jsonl").write_bytes(b'{"a": 1}\n{"a": 100}\n')
    with pytest.raises(DataError, match="too long") as caught:
        list(read_rows(tmp_path / "rows.jsonl"))
    assert caught.value.where == f"{tmp_path / 'rows.jsonl'}:2"


def test_rows_may_be_as_large_as_a_million_tokens_are() -> None:
    assert rows.LONGEST_LINE == 32 * 1024 * 1024


def test_a_rows_fields_are_named_in_order_up_to_the_twelfth() -> None:
    assert shown_fields({}) == "fields none" and shown_fields({"b": 1, "a": 2}) == "fields a, b"
    assert shown_fields({f"{number:02}": 1 for number in range(13)}).endswith(", 11")


def test_a_prompt_goes_before_what_older_data_calls_its_context() -> None:
    assert preference_row({**PAIR, "context": ""}) is None
    assert packed_row({**PACKED, "loss_mask": [0.0, True, 1]}) is None


def test_a_cut_line_shows_both_of_its_ends() -> None:
    for length, shown in ((60, 60), (61, 59)):
        with pytest.raises(DataError) as caught:
            parse_row(b"[" + b"x" * (length - 2) + b"y", "f:1")
        excerpt = str(caught.value.found).partition(" (")[0]
        assert len(excerpt) == shown and excerpt.endswith("y") and (" … " in excerpt) == (length == 61)
