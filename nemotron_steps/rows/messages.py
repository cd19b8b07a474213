"""Messages, tool calls and tools as others write them → as chat templates read them.

    message  {"role", "content": TEXT, "reasoning_content"?, "tool_calls"?, "tool_call_id"?, "name"?, ...}
    call     {"type": "function", "id"?, "function": {"name", "arguments": OBJECT}}
    tool     {"type": "function", "function": {"name", "description"?, "parameters"?, ...}}

Read are OpenAI's chat messages and Responses items, ShareGPT's `from` and `value`, content parts, JSON text in place of
lists and objects, and the nulls that Arrow puts where another row has a value. Anything that a model could be shown and
that is not read (images, audio, hosted tools) is an E410 with file, line and field. Fields of a message that are not
known stay in it: its template may read them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from nemotron_steps.errors import DataError, show_line

Message = dict[str, Any]
Tool = dict[str, Any]

ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "developer": "system",
    "function": "tool",
    "observation": "tool",
    "tool_response": "tool",
    "function_response": "tool",
    "function_call": "assistant",
    "tool_call": "assistant",
}
"""Roles of others → of chat templates; any other stays as it is."""
_CALLING = ("function_call", "tool_call")
"""ShareGPT's roles of a turn whose value is a call, or a list of calls, as JSON text."""
_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "summary_text", "reasoning_text", "refusal"})
_REASONING = ("reasoning_content", "reasoning", "thinking")
_READ = frozenset({"role", "from", "content", "value", "tool_calls", "function_call", "refusal", *_REASONING})
_PLACE = re.compile(r"\[\d+\]")
_OF_ITEMS = frozenset({"type", "status", "id"})
"""What a message of the Responses API has besides."""


def wrong(what: str, where: str, field: str = "", *, expected: str | None = None, found: Any = None) -> DataError:
    """The error of a row that cannot be read.

    Args:
        what: a sentence, or what is said of the field: "must be ...", "has ...".
        found: shown as the beginning of its JSON.
    """
    if field and what.startswith(("must ", "has ", "is ")):
        what = f"`{_PLACE.sub('', field)}` {what}"  # without its place, so that rows are counted by reason
    shown = None if found is None else json.dumps(found, ensure_ascii=True, default=str)[:120]
    place = f"{where} field {field}" if field else where
    return DataError(what, where=place, expected=expected, found=shown, hints=show_line(where))


def is_list(value: Any) -> bool:
    """Whether a value is a list of any kind."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def decoded(value: Any) -> Any:
    """A value, or the list or object that it is as JSON text."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def read_messages(
    value: Any, where: str, field: str, tools: Sequence[Tool] | None = (), *, start: int = 0
) -> list[Message]:
    """A list of messages or Responses items, also as JSON text.

    Args:
        where: `file:line`, for errors. field: what holds them.
        tools: what the row offers, as `read_tools` gave it: arguments of calls that are null go unless a tool takes
            null there. None: all of them stay.
        start: number of the first, for errors.

    Raises:
        DataError: E410.
    """
    items = decoded(value)
    if not is_list(items) or not items:
        raise wrong("must be a non-empty list of messages", where, field, found=value)
    messages: list[Message] = []
    reasoning = ""
    for place, item in enumerate(items, start):
        at = f"{field}[{place}]"
        if not isinstance(item, Mapping):
            raise wrong("a message must be an object", where, at, expected='{"role": ..., "content": ...}', found=item)
        item = {key: each for key, each in item.items() if each is not None}
        kind = item.get("type", "message")
        if kind == "reasoning":
            reasoning += _text(item.get("summary") or item.get("content", ""), where, at)[0]
            continue
        if kind == "function_call":
            call = _call(item, where, at, tools)
            if reasoning or not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            content = _tool_text(item.get("output", ""), where, f"{at}.output")
            messages.append({"role": "tool", "content": content, **_given(tool_call_id=item.get("call_id"))})
        elif kind == "message" or "role" in item or "from" in item:
            messages.append(_message(item, where, at, tools))
        else:
            raise wrong(
                f"unknown input item of type '{kind}'",
                where,
                at,
                expected="message, reasoning, function_call or function_call_output",
            )
        if reasoning:
            if messages[-1]["role"] == "assistant":
                messages[-1].setdefault("reasoning_content", reasoning)
            reasoning = ""
    for place, message in enumerate(messages, start):
        _require_utf8(message, where, f"{field}[{place}]")
    return messages


def read_tools(value: Any, where: str, field: str) -> list[Tool]:
    """Function tools, each as OpenAI's chat API nests it; the Responses API's flat ones, bare schemas and JSON text are
    read too. `strict` is an option of an API and goes, as in NeMo-Gym.

    Raises:
        DataError: E410.
    """
    tools = decoded(value)
    if tools is None or tools == "":
        return []
    if isinstance(tools, Mapping):
        tools = [tools]
    if not is_list(tools):
        raise wrong("must be a list of tools, or one as JSON text", where, field, found=value)
    read = []
    for place, given in enumerate(tools):
        at = f"{field}[{place}]"
        tool = decoded(given)
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if isinstance(tool, Mapping) and kind not in (None, "function") and "name" not in tool:
            raise wrong(f"tools of type '{kind}' cannot be offered", where, at, expected='"type": "function"')
        function = decoded(tool.get("function") or tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise wrong("a tool must be an object with a name", where, at, found=given)
        shown = {
            key: _unpadded_schema(decoded(each) if key == "parameters" else each) for key, each in function.items()
        }
        for key in ("type", "strict"):
            shown.pop(key, None)
        read.append({"type": "function", "function": {key: each for key, each in shown.items() if each is not None}})
        _require_utf8(read[-1], where, at)
    return read


def flat(tool: Tool) -> dict[str, Any]:
    """A tool in the shape of the Responses API."""
    return {"type": "function", **tool["function"]}


def read_template_kwargs(value: Any, where: str) -> dict[str, Any]:
    """Variables of the chat template that a row asks for, also as JSON text. DataError: E410."""
    found = decoded(value) if value else {}
    if not isinstance(found, Mapping):
        raise wrong(
            "must be an object", where, "chat_template_kwargs", expected='{"enable_thinking": false}', found=value
        )
    return {key: each for key, each in found.items() if each is not None}


def texts_of(message: Mapping[str, Any]) -> str:
    """A message as plain text, its calls as `name({arguments})`: for judges and counts."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    made = [f"{call['name']}({json.dumps(call['arguments'], ensure_ascii=False)})" for call in calls]
    return "\n".join(part for part in (message["content"], *made) if part)


def unpadded(value: Any) -> Any:
    """A value of a columnar file without the keys that are null: they are there because another row has them."""
    if isinstance(value, Mapping):
        return {key: unpadded(each) for key, each in value.items() if each is not None}
    return [unpadded(each) for each in value] if is_list(value) else value


def written(messages: Sequence[Message]) -> list[Message]:
    """Messages as they are written to a file: arguments that have a null are JSON text, whose nulls stay."""

    def one(call: dict[str, Any]) -> dict[str, Any]:
        arguments = call["function"]["arguments"]
        if unpadded(arguments) == arguments:
            return call
        return {**call, "function": {**call["function"], "arguments": json.dumps(arguments, ensure_ascii=False)}}

    return [{**m, "tool_calls": [*map(one, m["tool_calls"])]} if m.get("tool_calls") else m for m in messages]


def _message(item: Mapping[str, Any], where: str, at: str, tools: Sequence[Tool] | None) -> Message:
    named = item.get("role", item.get("from"))
    if not isinstance(named, str) or not named:
        raise wrong("a message must have a role", where, at, expected='{"role": "user", "content": ...}', found=item)
    role = ROLES.get(named.lower(), named)
    given = item.get("content", item.get("value"))
    calls = item.get("tool_calls") or ([item["function_call"]] if item.get("function_call") else [])
    if named in _CALLING and not calls:
        calls, given = given, ""
    calls = decoded(calls)
    calls = [calls] if isinstance(calls, Mapping) else calls
    if not is_list(calls):
        raise wrong("must be a list of calls", where, f"{at}.tool_calls", found=calls)
    if role == "tool":
        text, thought = _tool_text("" if given is None else given, where, f"{at}.content"), ""
    else:
        refusal = item.get("refusal") if not given else None
        text, thought = _text(given or refusal or "", where, f"{at}.content")
    reasoning = next((_text(item[key], where, f"{at}.{key}")[0] for key in _REASONING if item.get(key)), thought)
    if given is None and not text and not calls and not reasoning and role != "tool":
        raise wrong("has neither `content` nor `tool_calls`", where, at)
    others = {key: each for key, each in item.items() if key not in _READ and not ("type" in item and key in _OF_ITEMS)}
    if role == "tool" and "call_id" in others:
        others["tool_call_id"] = others.pop("call_id")
    message = {**others, "role": role, "content": text, **_given(reasoning_content=reasoning)}
    if calls:
        message["tool_calls"] = [
            _call(call, where, f"{at}.tool_calls[{place}]", tools) for place, call in enumerate(calls)
        ]
    return message


def _text(content: Any, where: str, at: str) -> tuple[str, str]:
    """(text, reasoning) of content: a text, a part, or a list of parts, which are joined without anything between."""
    if isinstance(content, str):
        return content, ""
    said, thought = "", ""
    parts = [content] if isinstance(content, Mapping) else content
    if not is_list(parts):
        raise wrong("must be a text or a list of parts", where, at, found=content)
    for place, part in enumerate(parts):
        if isinstance(part, str):
            said += part
            continue
        part = {key: each for key, each in part.items() if each is not None} if isinstance(part, Mapping) else {}
        kind = part.get("type", "text" if "text" in part else None)
        text = part.get("text", part.get("refusal", part.get("thinking")))
        if kind == "thinking" and isinstance(text, str):
            thought += text
        elif kind in _TEXT_PARTS and isinstance(text, str):
            said += text
        else:
            raise wrong(
                f"content of type '{kind}' cannot be shown to a language model"
                if kind
                else "a part of the content must be a text",
                where,
                f"{at}[{place}]",
                expected='text: {"type": "text", "text": ...}',
                found=parts[place],
            )
    return said, thought


def _tool_text(content: Any, where: str, at: str) -> str:
    """What a tool gave: text, parts of text, or a value, which becomes JSON."""
    if is_list(content) and content and all(isinstance(part, str) or _is_part(part) for part in content):
        return _text(content, where, at)[0]
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def _is_part(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("type"), str)


def _call(value: Any, where: str, at: str, tools: Sequence[Tool] | None) -> dict[str, Any]:
    call = decoded(value)
    function = decoded(call.get("function") or call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise wrong("a tool call must be an object with a name", where, at, found=value)
    name, given = function["name"], function.get("arguments")
    try:
        arguments = json.loads(given or "{}") if isinstance(given, str) else given or {}
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, Mapping):
        raise wrong(
            "the arguments of a call must be a JSON object", where, f"{at}.arguments", expected="an object", found=given
        )
    if tools is not None and not isinstance(given, str) and not isinstance(value, str):  # JSON text has no padding
        nullable = _nullable_arguments(name, tools)
        arguments = {key: unpadded(each) for key, each in arguments.items() if each is not None or key in nullable}
    known = {"type": "function", "function": {"name": name, "arguments": dict(arguments)}}
    return {**known, **_given(id=call.get("call_id") or call.get("id"))}


def _nullable_arguments(name: str, tools: Sequence[Tool]) -> set[str]:
    """Arguments of a tool for which its schema takes null."""
    for tool in tools:
        function = tool["function"]
        schema = function.get("parameters")
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        if function["name"] == name and isinstance(properties, Mapping):
            return {key for key, each in properties.items() if isinstance(each, Mapping) and _takes_null(each)}
    return set()


def _takes_null(schema: Mapping[str, Any]) -> bool:
    kinds = schema.get("type")
    options = [each for key in ("anyOf", "oneOf") for each in schema.get(key) or () if isinstance(each, Mapping)]
    return (
        kinds == "null"
        or (isinstance(kinds, list) and "null" in kinds)
        or bool(schema.get("nullable"))
        or any(map(_takes_null, options))
    )


def _unpadded_schema(schema: Any) -> Any:
    """A JSON schema without keys that are null, but for `default` and `const`, whose null means something."""
    if isinstance(schema, Mapping):
        kept = {key: each for key, each in schema.items() if each is not None or key in ("default", "const")}
        return {key: _unpadded_schema(each) for key, each in kept.items()}
    return [_unpadded_schema(each) for each in schema] if is_list(schema) else schema


def _given(**fields: Any) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value}


def _require_utf8(value: Mapping[str, Any], where: str, at: str) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise wrong(
            "the text has half of a surrogate pair, which no tokenizer can read",
            where,
            at,
            expected="text that can be written as UTF-8",
            found=error.object[max(error.start - 20, 0) : error.end + 20],
        ) from error
