"""Line-by-line checks of JSON Lines artifacts: every row parses and has the shape its type promises.

What an environment needs of a row beyond the shape is the environment's own check, not this one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from nemotron_steps.errors import DataError, show_line, without_line

Row = dict[str, Any]
LONGEST_LINE = 32 << 20
"""Bytes of a line: a row of a million tokens has about five million."""
RowCheck = Callable[[Row], str | None]
"""Returns what is wrong with a row, or None."""

_decode = msgspec.json.Decoder().decode


def read_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """Yield (line number from 1, row) of a JSON Lines file. Blank lines are skipped.

    Raises DataError naming file and line for a line that is not a JSON object, telling a line that was cut off
    (the last one, without its newline) from one that is malformed, or that is longer than any row.
    """
    with path.open("rb") as file:
        # Bounded, so that a file of another kind is told before it is in memory.
        for number, raw in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), b""), start=1):
            if len(raw) > LONGEST_LINE:
                raise DataError(
                    "the line is too long for a row",
                    where=f"{path}:{number}",
                    expected=f"at most {LONGEST_LINE >> 20} MiB a line, one JSON object each",
                    found=f"more, beginning with {_excerpt(raw[:60])}",
                )
            if not raw.strip():
                continue
            row, _ = parse_row(raw, f"{path}:{number}")
            yield number, row


def parse_row(line: bytes, where: str) -> tuple[Row, bool]:
    """(row, whether it is strict JSON). The same lines are rows as for Python's json, which takes NaN for a number.

    Raises:
        DataError: the line is not a JSON object.
    """
    try:
        row, strict = _decode(line), True
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        row, strict = _parse_leniently(line, where), False
    if not isinstance(row, dict):
        raise DataError(
            "the row is not a JSON object",
            where=where,
            expected="an object",
            found=_excerpt(line),
            hints=show_line(where),
        )
    return row, strict


def check_file(path: Path, check: RowCheck) -> int:
    """Check every row of one file and return how many there are. DataError names the first bad row."""
    count = 0
    for number, row in read_rows(path):
        problem = check(row)
        if problem is not None:
            raise DataError(
                problem,
                where=f"{path}:{number}",
                found=shown_fields(row),
            )
        count += 1
    return count


def shown_fields(row: Mapping[str, Any]) -> str:
    """What a row has, for errors: the names of its first fields."""
    return "fields " + (", ".join(name[:40] for name in sorted(row)[:12]) or "none")


def any_row(row: Row) -> str | None:
    """training_jsonl: any JSON object."""
    return None


def prompt_row(row: Row) -> str | None:
    """rl_prompts: the NeMo-Gym shape, `responses_create_params.input` with verifier fields beside it."""
    if "_hf_placeholder" in row:
        return "the row is a placeholder that data preparation has not filled in (`_hf_placeholder`)"
    params = row.get("responses_create_params")
    if not isinstance(params, dict):
        return "the row has no `responses_create_params` object"
    value = params.get("input")
    if isinstance(value, str):
        return None if value.strip() else "`responses_create_params.input` is empty"
    if not isinstance(value, list) or not value:
        return "`responses_create_params.input` must be a text or a non-empty list of items"
    if not all(isinstance(item, dict) for item in value):
        return "`responses_create_params.input` has an item that is not an object"
    return None


A_PROMPT = (
    '{"responses_create_params": {"input": [{"role": "user", "content": "1 + 1?"}]}, "agent_ref": {"name": "AGENT"}}, '
    "with the fields that its environment needs"
)
"""A row that prompt_row has nothing against."""
A_CHAT = '{"messages": [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]}'
"""A row that chat_row has nothing against."""


def chat_row(row: Row) -> str | None:
    """sft_chats: `messages`, each with a role and content (or tool calls), at least one from the assistant."""
    problem = _messages_problem(row.get("messages"), "messages")
    if problem is not None:
        return problem
    if not any(message["role"] == "assistant" for message in row["messages"]):
        return "`messages` has no assistant message: nothing to train on"
    return None


def packed_row(row: Row) -> str | None:
    """packed_chats: `input_ids`, for each whether the next one is trained, and where each chat begins."""
    ids, mask, starts = (row.get(key) for key in ("input_ids", "loss_mask", "seq_start_id"))
    if not isinstance(ids, list) or not ids or {*map(type, ids)} != {int} or min(ids) < 0:
        return "`input_ids` must be a non-empty list of token ids"
    # The types first: what a broken row has here may not go into a set.
    numbers = isinstance(mask, list) and {*map(type, mask)} <= {int, float, bool}
    if not isinstance(mask, list) or not numbers or len(mask) != len(ids) or not {*mask} <= {0, 1}:
        return "`loss_mask` must be a 0 or 1 for each of `input_ids`"
    if not isinstance(starts, list) or {*map(type, starts)} != {int} or starts[0] != 0:
        return "`seq_start_id` must be a list of places that begins with 0"
    if any(b <= a for a, b in pairwise([*starts, len(ids)])):
        return "`seq_start_id` must rise, and end before the last of `input_ids`"
    return None


def preference_row(row: Row) -> str | None:
    """preference_pairs: `prompt` (text or messages) with `chosen` and `rejected` answers that differ."""
    prompt = row.get("prompt", row.get("context"))
    if isinstance(prompt, list):
        problem = _messages_problem(prompt, "prompt")
        if problem is not None:
            return problem
    elif not isinstance(prompt, str) or not prompt:
        return "the row has no `prompt` (a text or a list of messages)"
    for key in ("chosen", "rejected"):
        if not isinstance(row.get(key), str | list | dict) or not row[key]:
            return f"the row has no `{key}` answer"
    if row["chosen"] == row["rejected"]:
        return "`chosen` and `rejected` are the same answer"
    return None


def agent_name(row: Row) -> str | None:
    """The agent (environment) an RL prompt names, if any."""
    reference = row.get("agent_ref")
    return reference.get("name") if isinstance(reference, dict) else None


def sniff_row(row: Row) -> str:
    """The finest artifact type whose shape the row has."""
    if "responses_create_params" in row:
        return "rl_prompts"
    if "chosen" in row and "rejected" in row:
        return "preference_pairs"
    if "messages" in row:
        return "sft_chats"
    if "input_ids" in row and "seq_start_id" in row:
        return "packed_chats"
    return "training_jsonl"


def _messages_problem(messages: Any, name: str) -> str | None:
    if not isinstance(messages, list) or not messages:
        return f"the row has no `{name}` (a non-empty list)"
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return f"`{name}[{index}]` has no `role`"
        if message.get("content") is None and not message.get("tool_calls"):
            return f"`{name}[{index}]` has neither `content` nor `tool_calls`"
    return None


def _parse_leniently(line: bytes, where: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        cut_off = not line.endswith(b"\n")
        raise DataError(
            "the last line is cut off: the file is truncated" if cut_off else "the line is not JSON",
            where=where,
            expected="one complete JSON object a line",
            found=f"{_excerpt(line)} ({error.msg if isinstance(error, json.JSONDecodeError) else error})",
            hints=(*without_line(where), *show_line(where)),
        ) from error


def _excerpt(line: bytes) -> str:
    text = line.decode("utf-8", errors="replace").strip()
    return text if len(text) <= 60 else text[:28] + " … " + text[-28:]
