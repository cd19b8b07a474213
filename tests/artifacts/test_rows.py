"""The shape of a row of every type: the smallest that is one, and every smallest change that makes it none."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from nemotron_steps.artifacts.rows import (
    A_CHAT,
    Row,
    RowCheck,
    agent_name,
    chat_row,
    packed_row,
    preference_row,
    prompt_row,
    sniff_row,
)

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
