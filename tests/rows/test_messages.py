"""Messages, calls and tools as others write them, and as chat templates read them."""

import json
import re
from typing import Any

import pytest

from nemotron_steps.errors import DataError
from nemotron_steps.rows.messages import read_messages, read_tools, written

CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
NULLABLE = {
    "b": {"type": ["string", "null"]},
    "c": {"anyOf": [{"type": "null"}]},
    "d": {"properties": {"f": {"enum": ["x", None]}}},
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": NULLABLE}}}]


def called(arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "arguments": arguments}}


def said(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", **fields}


MESSAGES: dict[str, tuple[Any, list[dict[str, Any]]]] = {
    "nulls": ([{"role": "user", "content": "x", "name": None, "tool_calls": None}], [{"role": "user", "content": "x"}]),
    "parts": (
        [{"role": "user", "content": [{"type": "text", "text": "x", "image": None}, "y", {"text": "z"}]}],
        [{"role": "user", "content": "xyz"}],
    ),
    "reasoning": ([said(content="x", reasoning="r")], [said(content="x", reasoning_content="r")]),
    "reasoning alone": ([said(content=None, thinking="r")], [said(reasoning_content="r")]),
    "arguments as text": ([said(tool_calls=[{"name": "f", "arguments": '{"a": 1}'}])], [said(tool_calls=[CALL])]),
    "padded beside nulls as text": (
        [said(tool_calls=['{"name": "f", "arguments": {"x": null}}', {"name": "f", "arguments": {"x": None}}])],
        [said(tool_calls=[called({"x": None}), called({})])],
    ),
    "padded arguments": (
        [said(tool_calls=[called({"a": 1, "x": None, "b": None, "c": None, "d": {"e": None, "f": None}})])],
        [said(tool_calls=[called({"a": 1, "b": None, "c": None, "d": {"f": None}})])],
    ),
    "arguments of others": (
        [said(tool_calls=[{"name": "f", key: {"a": 1}} for key in ("parameters", "args", "input")])],
        [said(tool_calls=[CALL] * 3)],
    ),
    "a map of Arrow, and none": (
        [said(tool_calls=[{"name": "f", "arguments": [["a", 1]]}, {"name": "f", "arguments": "null"}])],
        [said(tool_calls=[CALL, called({})])],
    ),
    "a function_call of nulls": (
        [{"role": "User", "content": "x", "function_call": {"name": None, "arguments": None}, "tool_calls": "null"}],
        [{"role": "user", "content": "x"}],
    ),
    "content under other names": (
        [{"role": "tool", "output": "1"}, {"role": "AI", "text": "x", "train": False}],
        [{"role": "tool", "content": "1"}, said(content="x", weight=0)],
    ),
    "parts of thought, and a text that is null": (
        [said(content=[{"type": "reasoning_text", "text": "r"}, {"type": "text", "text": None}, "x"])],
        [said(content="x", reasoning_content="r")],
    ),
    "reasoning in both places": (
        [said(content="<think>r</think>x", reasoning_content="r")],
        [said(content="x", reasoning_content="r")],
    ),
    "reasoning that nothing follows": (
        [{"type": "reasoning", "summary": ["r"]}, {"role": "user", "content": "x"}],
        [said(reasoning_content="r"), {"role": "user", "content": "x"}],
    ),
    "a tool's value": ([{"role": "tool", "content": {"t": 21}}], [{"role": "tool", "content": '{"t": 21}'}]),
    "items": (
        [
            {"role": "developer", "content": "d", "type": "message", "status": "completed", "id": "m"},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "r"}], "id": "rs", "status": None},
            {"type": "function_call", "name": "f", "arguments": '{"a": 1}', "call_id": "c", "id": "fc"},
            {"type": "function_call", "name": "f", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": "c", "output": "o"},
            {"type": "function_call_output", "output": [{"type": "input_text", "text": "p"}]},
            {"role": "assistant", "content": "x"},
            {"type": "function_call", "name": "f", "arguments": '{"a": 1}'},
        ],
        [
            {"role": "system", "content": "d"},
            said(tool_calls=[{**CALL, "id": "c"}, CALL], reasoning_content="r"),
            {"role": "tool", "content": "o", "tool_call_id": "c"},
            {"role": "tool", "content": "p"},
            said(content="x", tool_calls=[CALL]),
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MESSAGES)
def test_messages_are_read_and_reading_them_again_changes_nothing(name: str) -> None:
    given, expected = MESSAGES[name]
    read = read_messages(given, "f:1", "messages", TOOLS)
    assert read == expected == read_messages(written(read), "f:1", "messages", TOOLS)
    assert read_messages(read, "f:1", "messages", None) == read


@pytest.mark.parametrize(
    ("message", "what", "field"),
    [
        ("x", "must be an object", ""),
        ({"content": "x"}, "must have a role", ""),
        ({"role": "assistant", "tool_calls": []}, "has neither", ""),
        ({"role": "user", "content": 5}, "must be a text or a list of parts", ".content"),
        ({"role": "user", "content": [{"type": "image", "image": "x"}]}, "content of type 'image'", ".content[0]"),
        ({"role": "user", "content": "x", "images": ["y"]}, "models here read text alone", ".images"),
        ({"role": "user", "content": [{"text": "x", "image": "y"}]}, "content of type 'image'", ".content[0]"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "must be an object with a name", ".tool_calls[0]"),
        (said(tool_calls=[{"name": "f", "arguments": "{"}]), "must be a JSON object", ".tool_calls[0].arguments"),
        ({"type": "web_search_call"}, "unknown input item of type 'web_search_call'", ""),
        ({"role": "user", "content": "\ud83d"}, "half of a surrogate pair", ""),
        (said(tool_calls=[called({"a": "\ude00"})]), "half of a surrogate pair", ""),
    ],
)  # fmt: skip
def test_a_message_that_cannot_be_read_is_told_by_its_field(message: Any, what: str, field: str) -> None:
    with pytest.raises(DataError, match=re.escape(what)) as caught:
        read_messages([{"role": "user", "content": "x"}, message], "f:7", "messages")
    assert caught.value.where == f"f:7 field messages[1]{field}"


def padded(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
NESTED = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (None, []),
        ([NESTED], [NESTED]),
        ([{"type": "function", "name": "f", "parameters": SCHEMA, "strict": True}], [NESTED]),
        ([{"name": "f", "parameters": SCHEMA, "description": None}], [NESTED]),
        ({"function": {"name": "f", "parameters": json.dumps(SCHEMA)}}, [NESTED]),
        ([{"name": "f", "input_schema": SCHEMA}], [NESTED]),
        ("null", []),
        ('[{"name": "f"}]', [{"type": "function", "function": {"name": "f"}}]),
        (['{"name": "f"}'], [{"type": "function", "function": {"name": "f"}}]),
        ([padded({"city": {"type": "string", "default": None, "enum": None}, "a": None})],
         [padded({"city": {"type": "string", "default": None}})]),
    ],
)  # fmt: skip
def test_tools_are_read(given: Any, read: list[Any]) -> None:
    assert read_tools(given, "f:1", "tools") == read == read_tools(read, "f:1", "tools")


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ("look_up", "must be a list of tools"),
        ([{}], "must be an object with a name"),
        ([{"type": "web_search"}], "tools of type 'web_search'"),
        ([{"type": "function", "function": {"name": ""}}], "must be an object with a name"),
        ([{"name": "\ud83d"}], "half of a surrogate pair"),
    ],
)
def test_tools_that_cannot_be_read_are_refused(given: Any, what: str) -> None:
    with pytest.raises(DataError, match=re.escape(what)):
        read_tools(given, "f:1", "tools")
