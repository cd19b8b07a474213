"""Between decoded text and assistant turns, by the two parsers that `policy.generation` names.

hermes          <tool_call>{"name": ..., "arguments": {...}}</tool_call>, as Hermes, Qwen2.5 and Qwen3
qwen3_coder     <tool_call> <function=NAME> <parameter=KEY> VALUE </parameter> </function> </tool_call>, as Qwen3-Coder
                and Nemotron 3: a value is plain text, whose meaning is the offered tool's schema's
llama3_json     the whole answer is {"name": ..., "parameters": {...}}, or several between semicolons, as Llama 3.1, 3.2
nemotron_json   <TOOLCALL>[{"name": ..., "arguments": {...}}, ...]</TOOLCALL>, as Nemotron Nano 2, Llama-Nemotron
none            the model calls no tools, or the caller wants its text as it is

A parser takes well-formed calls out of the text. A malformed call stays in it, and is named besides: it is never
guessed at. Searching for a closing tag alone would cut a call whose argument contains that tag. Not for: rendering to
tokens (models/chat.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemotron_steps.config.schema.policy import GenerationConfig, ReasoningParserName, ToolParserName
from nemotron_steps.environments.responses import THINK_CLOSE, ToolCall, message_item, reasoning_item, split_reasoning
from nemotron_steps.models.chat import ChatFormat

_SPACE = re.compile(r"\s*")


@dataclass(frozen=True)
class ParsedCalls:
    """An answer taken apart."""

    text: str
    calls: tuple[tuple[str, str], ...] = ()
    malformed: tuple[str, ...] = ()


ToolParser = Callable[[str, Sequence[Mapping[str, Any]]], ParsedCalls]
"""(answer without reasoning, tools offered) → ParsedCalls."""


class MalformedCallError(ValueError):
    """A call that cannot be read. Internal to the parsers: it becomes ParsedCalls.malformed."""


def read_json(text: str, start: int) -> tuple[Any, int]:
    """The JSON value that begins at or after `start`, and where it ends."""
    try:
        return _DECODER.raw_decode(text, skip_space(text, start))
    except (ValueError, RecursionError) as error:
        raise MalformedCallError(str(error)) from error


def skip_space(text: str, start: int) -> int:
    """Position of the first character at or after `start` that is not white space."""
    found = _SPACE.match(text, start)
    assert found is not None  # the pattern matches the empty string
    return found.end()


def call_of(value: Any, arguments_key: str = "arguments") -> tuple[str, str]:
    """(name, arguments as JSON text) of a call written as a JSON object."""
    if not isinstance(value, dict):
        raise MalformedCallError("the call is not an object")
    name, arguments = value.get("name"), value.get(arguments_key)
    if not isinstance(name, str) or not name:
        raise MalformedCallError("the call has no name")
    if isinstance(arguments, str):  # some models write the arguments as text, as OpenAI's API does
        return name, arguments
    if not isinstance(arguments, dict):
        raise MalformedCallError(f"`{arguments_key}` is not an object")
    return name, json.dumps(arguments)


def take_tagged(
    text: str, opening: str, closing: str, read: Callable[[str, int], tuple[list[tuple[str, str]], int]]
) -> ParsedCalls:
    """Take every `opening … closing` block out of a text."""
    kept: list[str] = []
    calls: list[tuple[str, str]] = []
    malformed: list[str] = []
    position = 0
    while (begin := text.find(opening, position)) >= 0:
        kept.append(text[position:begin])
        inside = begin + len(opening)
        try:
            found, end = read(text, inside)
            end = skip_space(text, end)
            if not text.startswith(closing, end):
                raise MalformedCallError(f"no {closing} after the call")
        except MalformedCallError:
            body, closed, _ = text[inside:].partition(closing)
            end = inside + len(body) + len(closed)
            # A call that was cut off before its closing tag is text like any other.
            if closed:
                malformed.append(body.strip())
            kept.append(text[begin:end])
        else:
            calls.extend(found)
            end += len(closing)
        position = end
    if not calls:
        return ParsedCalls(text, (), tuple(malformed))
    return ParsedCalls("".join([*kept, text[position:]]).strip(), tuple(calls), tuple(malformed))


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _one_call(text: str, start: int) -> tuple[list[tuple[str, str]], int]:
    value, end = read_json(text, start)
    return [call_of(value)], end


def _list_of_calls(text: str, start: int) -> tuple[list[tuple[str, str]], int]:
    value, end = read_json(text, start)
    items = value if isinstance(value, list) else [value]
    if not items:
        raise MalformedCallError("an empty list of calls")
    return [call_of(item) for item in items], end


_PYTHON_TAG = "<|python_tag|>"


def llama3_json(text: str, tools: Sequence[Mapping[str, Any]]) -> ParsedCalls:
    """An answer with any other text calls nothing."""
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


def qwen3_coder(text: str, tools: Sequence[Mapping[str, Any]]) -> ParsedCalls:
    """A value cannot contain `</parameter>`."""

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


TOOL_PARSERS: dict[ToolParserName, ToolParser] = {
    "hermes": lambda text, tools: take_tagged(text, "<tool_call>", "</tool_call>", _one_call),
    "qwen3_coder": qwen3_coder,
    "llama3_json": llama3_json,
    "nemotron_json": lambda text, tools: take_tagged(text, "<TOOLCALL>", "</TOOLCALL>", _list_of_calls),
    "none": lambda text, tools: ParsedCalls(text),
}
TOOL_CALL_MARKERS: dict[ToolParserName, tuple[str, ...]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "qwen3_coder": ("<tool_call>", "</tool_call>", "<function=", "</function>"),
    "llama3_json": ("<|python_tag|>",),
    "nemotron_json": ("<TOOLCALL>", "</TOOLCALL>"),
    "none": (),
}
"""What a format writes calls with: left in a turn's text once its calls are taken out, it is a call gone wrong."""


ReasoningParser = Callable[[str], tuple[str, str]]
"""Text of one assistant turn → (reasoning, answer)."""


def deepseek_r1(text: str) -> tuple[str, str]:
    """For templates that open the thinking in the prompt: all is reasoning until the closing tag, or to the end."""
    if THINK_CLOSE in text:
        return split_reasoning(text)
    return text.removeprefix("<think>").strip(), ""


REASONING_PARSERS: dict[ReasoningParserName, ReasoningParser] = {
    "qwen3": split_reasoning,
    "deepseek_r1": deepseek_r1,
    "nano_v3": deepseek_r1,
    "none": lambda text: ("", text),
}
"""qwen3: `<think>…</think>` where the model wrote it; a text without tags is all answer. nano_v3: Nemotron 3's
name for the same format as deepseek_r1. none: the model does not think aloud, or its text is wanted as it is."""

OPENED_BY_TEMPLATE: frozenset[ReasoningParserName] = frozenset({"deepseek_r1", "nano_v3"})
"""Formats whose template ends the prompt with the opening tag: every turn begins inside its thinking and has to close
it."""


@dataclass(frozen=True)
class AssistantTurn:
    """What one assistant turn says, taken apart."""

    text: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    malformed_tool_calls: tuple[str, ...] = ()

    def output_items(self) -> list[dict[str, Any]]:
        """The turn as OpenAI Responses output items."""
        items: list[dict[str, Any]] = []
        if self.reasoning:
            items.append(reasoning_item(self.reasoning))
        if self.text or not self.tool_calls:
            items.append(message_item(self.text))
        for call in self.tool_calls:
            items.append(
                {"type": "function_call", "name": call.name, "arguments": call.arguments, "call_id": call.call_id}
            )
        return items


@dataclass(frozen=True)
class TurnFormat:
    """How a model writes a turn: the names of its parsers."""

    reasoning_parser: ReasoningParserName = "qwen3"
    tool_parser: ToolParserName = "hermes"

    @classmethod
    def of(cls, config: GenerationConfig, chat: ChatFormat) -> TurnFormat:
        """As `policy.generation` says; but whether a turn begins inside its reasoning is read from the template, as one
        template may do either (`enable_thinking`)."""
        return cls(config.reasoning_parser, config.tool_parser).under(chat)

    def under(self, chat: ChatFormat) -> TurnFormat:
        """The same parsers, as the template begins a turn."""
        reasoning = self.reasoning_parser
        if reasoning != "none" and chat.opens_thinking != (reasoning in OPENED_BY_TEMPLATE):
            reasoning = "deepseek_r1" if chat.opens_thinking else "qwen3"
        return TurnFormat(reasoning, self.tool_parser)


DEFAULT_FORMAT = TurnFormat()
FORMAT_KEY = "turn_format"
"""`Rollout.metadata[FORMAT_KEY]`: names of the reasoning and the tool parser its turns are read with."""


def parse_assistant(
    text: str,
    call_prefix: str = "call",
    turn_format: TurnFormat = DEFAULT_FORMAT,
    tools: Sequence[Mapping[str, Any]] = (),
) -> AssistantTurn:
    """Take a decoded assistant turn apart. Calls that cannot be read stay in the text and are named, never guessed."""
    reasoning, answer = REASONING_PARSERS[turn_format.reasoning_parser](text)
    found = TOOL_PARSERS[turn_format.tool_parser](answer, tools)
    calls = tuple(ToolCall(name, arguments, f"{call_prefix}_{i}") for i, (name, arguments) in enumerate(found.calls))
    return AssistantTurn(found.text, reasoning, calls, found.malformed)
