"""qwen3_coder: calls in XML style, as Qwen3-Coder and Nemotron 3 write them.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

A value is plain text; the offered tool's JSON schema says what it means. A value cannot contain `</parameter>`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from nemotron_steps.engine.rollouts.parsers.tool_calls import (
    MalformedCallError,
    ParsedCalls,
    skip_space,
    take_tagged,
)

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>")
_VALUE_END = "</parameter>"
_FUNCTION_END = "</function>"
_TYPES: dict[str, type | tuple[type, ...]] = {
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "object": dict,
    "array": list,
    "null": type(None),
}


def qwen3_coder(text: str, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedCalls:
    """See the module docstring."""

    def read(text: str, start: int) -> tuple[list[tuple[str, str]], int]:
        head = _FUNCTION.match(text, start)
        if head is None:
            raise MalformedCallError("no <function=NAME>")
        name, position = head.group(1).strip(), head.end()
        properties = _properties(name, tools)
        arguments: dict[str, Any] = {}
        while (parameter := _PARAMETER.match(text, position)) is not None:
            key = parameter.group(1).strip()
            end = text.find(_VALUE_END, parameter.end())
            if end < 0:
                raise MalformedCallError(f"no {_VALUE_END}")
            value = text[parameter.end() : end].removeprefix("\n").removesuffix("\n")
            arguments[key] = _typed(value, properties.get(key))
            position = end + len(_VALUE_END)
        position = skip_space(text, position)
        if not text.startswith(_FUNCTION_END, position):
            raise MalformedCallError(f"no {_FUNCTION_END}")
        return [(name, json.dumps(arguments))], position + len(_FUNCTION_END)

    return take_tagged(text, "<tool_call>", "</tool_call>", read)


def _properties(name: str, tools: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """JSON schemas of a tool's parameters; empty when the tool is not offered or says nothing of them."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == name:
            properties = (function.get("parameters") or {}).get("properties")
            return properties if isinstance(properties, Mapping) else {}
    return {}


def _typed(value: str, schema: Any) -> Any:
    """The value as its schema's type; as text where the schema allows text only, says nothing, or does not fit."""
    types = _types(schema)
    if not types - {"string"}:
        return value
    stripped = value.strip()
    try:
        parsed = json.loads({"True": "true", "False": "false", "None": "null"}.get(stripped, stripped))
    except (ValueError, RecursionError):
        return value
    for kind in types - {"string"}:
        expected = _TYPES.get(kind)
        is_bool = isinstance(parsed, bool)
        if expected is not None and isinstance(parsed, expected) and is_bool == (kind == "boolean"):
            return parsed
    return value


def _types(schema: Any) -> set[str]:
    if not isinstance(schema, Mapping):
        return set()
    declared = schema.get("type")
    types = {declared} if isinstance(declared, str) else set(declared or ())
    for choice in ("anyOf", "oneOf"):
        for option in schema.get(choice) or ():
            types |= _types(option)
    return types
