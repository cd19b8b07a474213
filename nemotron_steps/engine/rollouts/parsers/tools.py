"""Tool parsers by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nemotron_steps.config.schema.policy import ToolParserName
from nemotron_steps.engine.rollouts.parsers.hermes import hermes
from nemotron_steps.engine.rollouts.parsers.llama3_json import llama3_json
from nemotron_steps.engine.rollouts.parsers.nemotron_json import nemotron_json
from nemotron_steps.engine.rollouts.parsers.qwen3_coder import qwen3_coder
from nemotron_steps.engine.rollouts.parsers.tool_calls import ParsedCalls, ToolParser


def no_tools(text: str, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedCalls:
    """The model calls no tools, or the caller wants its text as it is."""
    return ParsedCalls(text)


TOOL_PARSERS: dict[ToolParserName, ToolParser] = {
    "hermes": hermes,
    "qwen3_coder": qwen3_coder,
    "llama3_json": llama3_json,
    "nemotron_json": nemotron_json,
    "none": no_tools,
}

TOOL_CALL_MARKERS: dict[ToolParserName, tuple[str, ...]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "qwen3_coder": ("<tool_call>", "</tool_call>", "<function=", "</function>"),
    "llama3_json": ("<|python_tag|>",),
    "nemotron_json": ("<TOOLCALL>", "</TOOLCALL>"),
    "none": (),
}
"""What a format writes calls with: left in a turn's text once its calls are taken out, it is a call gone wrong."""
