"""llama3_json: the whole answer is `{"name": ..., "parameters": {...}}`, or several of them between semicolons, as
Llama 3.1 and 3.2 write calls. An answer with any other text calls nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nemotron_steps.engine.rollouts.parsers.tool_calls import (
    MalformedCallError,
    ParsedCalls,
    call_of,
    read_json,
    skip_space,
)

_PYTHON_TAG = "<|python_tag|>"


def llama3_json(text: str, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedCalls:
    """See the module docstring."""
    start = skip_space(text, 0)
    tagged = text.startswith(_PYTHON_TAG, start)
    position = skip_space(text, start + len(_PYTHON_TAG) if tagged else start)
    if not text.startswith("{", position):
        return ParsedCalls(text)
    calls: list[tuple[str, str]] = []
    try:
        while True:
            value, position = read_json(text, position)
            key = "arguments" if isinstance(value, dict) and "parameters" not in value else "parameters"
            calls.append(call_of(value, key))
            position = skip_space(text, position)
            if position == len(text):
                return ParsedCalls("", tuple(calls))
            if text[position] != ";":
                raise MalformedCallError("text after the call")
            position += 1
    except MalformedCallError:
        # JSON that names no tool is an answer; only what began as a call is a malformed one.
        attempted = tagged or '"name"' in text
        return ParsedCalls(text, (), (text.strip(),) if attempted else ())
