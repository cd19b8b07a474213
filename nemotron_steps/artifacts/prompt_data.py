"""What a user's prompts look like at a glance: whether they are some (type `prompt_data`), who speaks in them, and
whether they say who grades them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from nemotron_steps.artifacts.chat_templates import ROLES
from nemotron_steps.artifacts.rows import Row, read_rows
from nemotron_steps.errors import DataError

_TABLES = (".parquet", ".csv", ".tsv", ".json", ".jsonl.gz")
_PROMPTS = frozenset({"prompt", "messages", "conversations", "question", "problem", "instruction", "query", "input"})
_LOOKED_AT = 64
"""Rows, or files."""
_HEADER_BYTES = 1 << 16
TOOLS = "tools"
_THEIRS = {"human": "user", "gpt": "assistant"}
"""Roles of `conversations`."""


def looks_like_prompts(path: Path) -> bool:
    """Whether a path holds rows that data_prep/import_prompts may know: JSON Lines with a prompt's column, or a table.

    What is in a table is looked at by that step.
    """
    row = first_row(path)
    if row is not None:
        return has_prompt(row)
    if path.is_file():
        return path.name.lower().endswith(_TABLES) and path.stat().st_size > 0
    names = [file.name for file in path.rglob("*") if file.is_file()]
    return any(name in ("dataset_info.json", "dataset_dict.json") or name.endswith(".parquet") for name in names)


def first_row(path: Path) -> Row | None:
    """The first row of JSON Lines, a file or a folder; None where there is none."""
    files = [path] if path.suffix == ".jsonl" else sorted(path.rglob("*.jsonl")) if path.is_dir() else []
    return next((row for file in files for _, row in read_rows(file)), None)


def has_prompt(row: Mapping[str, Any]) -> bool:
    """Whether a row has a column that prompts of other trainers are in."""
    return not _PROMPTS.isdisjoint(row) and not {"chosen", "rejected"} <= row.keys()


def roles_in(path: Path) -> tuple[str, ...]:
    """Roles of the messages in the first rows of JSON Lines, as the policy will see them, and TOOLS where a row offers
    some; none of other files.

    What is wrong with a row is told by whoever reads all of them.
    """
    file = path if path.is_file() else next(iter(sorted(path.rglob("*.jsonl"))), path)
    if file.suffix != ".jsonl":
        return ()
    found: set[str] = set()
    try:
        for _, row in islice(read_rows(file), _LOOKED_AT):
            found.update(_roles_of(row))
    except DataError:
        pass
    return tuple(role for role in (*ROLES, TOOLS) if role in found)


def names_no_agent(path: Path) -> bool:
    """Whether rows are seen to name no agent that grades them: JSON Lines by their first row, a table by its columns.

    Of a folder, whether that is so of each file: its held-out rows may have a grader of their own, and beside JSON
    Lines a table is a report on them. False where it cannot be told at a glance.
    """
    if path.is_dir():
        every = sorted(file for file in path.rglob("*") if file.is_file() and file.stat().st_size > 0)
        rows = [file for file in every if file.suffix == ".jsonl"]
        files = rows or [file for file in every if file.suffix in (".parquet", ".csv", ".tsv")]
        return bool(files) and all(names_no_agent(file) for file in files[:_LOOKED_AT])
    match path.suffix.lower():
        case ".jsonl":
            try:
                return any("agent_ref" not in row for _, row in islice(read_rows(path), 1))
            except DataError:
                return False
        case ".csv" | ".tsv":
            with path.open("rb") as file:
                return b"agent_ref" not in file.readline(_HEADER_BYTES)
        case ".parquet":
            footer = _footer(path)
            return bool(footer) and b"agent_ref" not in footer
    return False


def _footer(path: Path) -> bytes:
    """The metadata at the end of a Parquet file, where columns are named in plain text; empty for another file."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - 8, 0))
        length, magic = int.from_bytes(file.read(4), "little"), file.read(4)
        if magic != b"PAR1" or length > size - 8:
            return b""
        file.seek(size - 8 - length)
        return file.read(length)


def _roles_of(row: Mapping[str, Any]) -> Iterator[str]:
    request = row.get("responses_create_params")
    if (request if isinstance(request, Mapping) else row).get("tools") not in (None, "", "[]", "null", []):
        yield TOOLS
    if isinstance(request, Mapping):
        if request.get("instructions"):
            yield "system"
        messages = request.get("input")
    else:
        messages = row.get("prompt") or row.get("messages") or row.get("conversations")
        if isinstance(messages, list) and messages and not row.get("prompt") and _role(messages[-1]) == "assistant":
            messages = messages[:-1]  # its answer
    if not isinstance(messages, list):
        yield "user"
        return
    for message in messages:
        role = _role(message)
        if role is not None:
            yield role


def _role(message: Any) -> str | None:
    if not isinstance(message, Mapping):
        return None
    if message.get("type") == "function_call_output":
        return "tool"
    role = message.get("role", message.get("from"))
    return _THEIRS.get(role, role) if isinstance(role, str) else None
