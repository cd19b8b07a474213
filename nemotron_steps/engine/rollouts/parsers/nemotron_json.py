"""nemotron_json: `<TOOLCALL>[{"name": ..., "arguments": {...}}, ...]</TOOLCALL>`, as Nemotron Nano 2 and the
Llama-Nemotron models write calls. Nemotron 3 writes qwen3_coder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nemotron_steps.engine.rollouts.parsers.tool_calls import (
    MalformedCallError,
    ParsedCalls,
    call_of,
    read_json,
    take_tagged,
)


def nemotron_json(text: str, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedCalls:
    """See the module docstring."""
    return take_tagged(text, "<TOOLCALL>", "</TOOLCALL>", _read)


def _read(text: str, start: int) -> tuple[list[tuple[str, str]], int]:
    value, end = read_json(text, start)
    items = value if isinstance(value, list) else [value]
    if not items:
        raise MalformedCallError("an empty list of calls")
    return [call_of(item) for item in items], end
