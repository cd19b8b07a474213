"""hermes: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes, Qwen2.5 and Qwen3 write calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nemotron_steps.engine.rollouts.parsers.tool_calls import ParsedCalls, call_of, read_json, take_tagged


def hermes(text: str, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedCalls:
    """See the module docstring."""
    return take_tagged(text, "<tool_call>", "</tool_call>", _read)


def _read(text: str, start: int) -> tuple[list[tuple[str, str]], int]:
    value, end = read_json(text, start)
    return [call_of(value)], end
