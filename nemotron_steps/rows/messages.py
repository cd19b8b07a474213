"""Messages, tool calls and tools as others write them → as chat templates read them.

    message  {"role", "content": TEXT, "reasoning_content"?, "tool_calls"?, "tool_call_id"?, "name"?, ...}
    call     {"type": "function", "id"?, "function": {"name", "arguments": OBJECT}}
    tool     {"type": "function", "function": {"name", "description"?, "parameters"?, ...}}

Read are OpenAI's chat messages and Responses items, ShareGPT's `from` and `value`, content parts, JSON text in place of
lists and objects, and the nulls that Arrow puts where another row has a value. Anything that a model could be shown and
that is not read (images, audio, hosted tools) is an E410 with file, line and field. Fields of a message that are not
known stay in it: its template may read them.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from nemotron_steps.errors import DataError, show_line

Message = dict[str, Any]
Tool = dict[str, Any]

ROLES = {
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "bot", "model", "ai"), "assistant"),
    **{role: role for role in ("system", "user", "assistant", "tool")},
    "developer": "system",
    **dict.fromkeys(("function", "observation", "tool_response", "function_response", "ipython"), "tool"),
    "function_call": "assistant",
    "tool_call": "assistant",
}
"""Roles of others, in any case → of chat templates; any other stays as it is."""
_CALLING = ("function_call", "tool_call")
"""ShareGPT's roles of a turn whose value is a call, or a list of calls, as JSON text."""
_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "summary_text", "refusal"})
_THOUGHT_PARTS = frozenset({"thinking", "reasoning", "reasoning_text"})
MEDIA = ("images", "image", "videos", "video", "audios", "audio")
_ARGUMENTS = ("arguments", "parameters", "args", "input")
"""Keys of a call's arguments: OpenAI's, Llama 3.1's, LangChain's, Anthropic's."""
_OF_RESULT = {"tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"}
_OF_CHAT = {"messages", "conversation", "tools", "chat_template", "add_generation_prompt", "continue_final_message"}
RENDERING = frozenset(_OF_CHAT | _OF_RESULT | {"return_assistant_tokens_mask", "kwargs", "self"})
"""Arguments of transformers' apply_chat_template but `documents`: none is a variable of a template."""
_NOTHING = (None, "", "null", "[]", "{}")
_CONTENT = ("content", "value", "text")
_REASONING = ("reasoning_content", "reasoning", "thinking")
_READ = frozenset({"role", "from", *_CONTENT, "tool_calls", "function_call", "refusal", "train", "loss", *_REASONING})
_PLACE = re.compile(r"\[\d+\]")
_OF_ITEMS = frozenset({"type", "status", "id"})


def wrong(what: str, where: str, field: str = "", *, expected: str | None = None, found: Any = None) -> DataError:
    """The error of a row that cannot be read."""
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
    """A list of messages or Responses items, also as JSON text."""
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
            reasoning += "".join(_text(item.get("summary") or item.get("content", ""), where, at))
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
            expected = "message, reasoning, function_call or function_call_output"
            raise wrong(f"unknown input item of type '{kind}'", where, at, expected=expected)
        if reasoning and messages[-1]["role"] == "assistant":
            messages[-1].setdefault("reasoning_content", reasoning)
        elif reasoning:
            messages.insert(-1, {"role": "assistant", "content": "", "reasoning_content": reasoning})
        reasoning = ""
    if reasoning:
        messages.append({"role": "assistant", "content": "", "reasoning_content": reasoning})
    for place, message in enumerate(messages, start):
        _require_utf8(message, where, f"{field}[{place}]")
    return messages


def read_tools(value: Any, where: str, field: str) -> list[Tool]:
    """Function tools, each as OpenAI's chat API nests it; the Responses API's flat ones, bare schemas and JSON text are
    read too. `strict` is an option of an API and goes, as in NeMo-Gym."""
    if value in _NOTHING:
        return []
    tools = decoded(value)
    if isinstance(tools, Mapping):
        tools = [tools]
    if not is_list(tools):
        raise wrong("must be a list of tools, or one as JSON text", where, field, found=value)
    read = []
    for place, given in enumerate(tools):
        at = f"{field}[{place}]"
        tool = decoded(given)
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if kind not in (None, "function"):
            raise wrong(f"tools of type '{kind}' cannot be offered", where, at, expected='"type": "function"')
        function = decoded(tool.get("function") or tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise wrong("a tool must be an object with a name", where, at, found=given)
        shown = {key: each for key, each in function.items() if key not in ("type", "strict") and each is not None}
        schema = shown.pop("input_schema", shown.get("parameters"))  # Anthropic's name for it
        if schema is not None:
            shown["parameters"] = _unpadded_schema(decoded(schema))
        read.append({"type": "function", "function": shown})
        _require_utf8(read[-1], where, at)
    return read


def flat(tool: Tool) -> dict[str, Any]:
    """A tool in the shape of the Responses API."""
    return {"type": "function", **tool["function"]}


def read_template_kwargs(value: Any, where: str) -> dict[str, Any]:
    """Variables of the chat template that a row asks for, also as JSON text. DataError: E410."""
    found = decoded(value) if value else {}
    field = "chat_template_kwargs"
    if not isinstance(found, Mapping):
        raise wrong("must be an object", where, field, expected='{"enable_thinking": false}', found=value)
    for name in sorted(RENDERING.intersection(found)):
        raise wrong(f"must not have `{name}`, which is not a template variable", where, field)
    return {key: each for key, each in found.items() if each is not None}


def texts_of(message: Mapping[str, Any]) -> str:
    """A message as plain text, its calls as `name({arguments})`: for judges and counts."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    made = [f"{call['name']}({json.dumps(call['arguments'], ensure_ascii=False)})" for call in calls]
    return "\n".join(part for part in (message["content"], *made) if part)


def unpadded(value: Any, kept: Sequence[str] = ()) -> Any:
    """A value of a columnar file without the keys that are null: they are there because another row has them."""
    if isinstance(value, Mapping):
        some = ((key, each) for key, each in value.items() if each is not None)
        return {key: each if key in kept else unpadded(each, kept) for key, each in some}
    return [unpadded(each, kept) for each in value] if is_list(value) else value


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
    given = next((item[key] for key in _CONTENT if key in item), item.get("output") if role == "tool" else None)
    calls = item.get("tool_calls")
    if calls in _NOTHING and isinstance(item.get("function_call"), Mapping) and item["function_call"].get("name"):
        calls = [item["function_call"]]
    if named in _CALLING and calls in _NOTHING:
        calls, given = given, ""
    calls = [] if calls in _NOTHING else decoded(calls)
    calls = [calls] if isinstance(calls, Mapping) else calls
    if not is_list(calls):
        raise wrong("must be a list of calls", where, f"{at}.tool_calls", found=calls)
    for name in MEDIA:
        if not is_blank(item.get(name)):
            raise wrong(f"a message has {name}, and models here read text alone", where, f"{at}.{name}")
    if role == "tool":
        text, thought = _tool_text("" if given is None else given, where, f"{at}.content"), ""
    else:
        said = item.get("refusal", "") if given in (None, "") else given
        text, thought = _text(said, where, f"{at}.content")
    reasoning = next(("".join(_text(item[key], where, f"{at}.{key}")) for key in _REASONING if item.get(key)), thought)
    if given is None and not text and not calls and not reasoning and role != "tool":
        raise wrong("has neither `content` nor `tool_calls`", where, at)
    opened, closed, rest = text.partition("</think>")
    if reasoning and closed and opened.replace("<think>", "", 1).strip() == reasoning.strip():
        text = rest  # the reasoning stands in both
    others = {key: each for key, each in item.items() if key not in _READ and not ("type" in item and key in _OF_ITEMS)}
    if role == "tool":
        others = {key: each for key, each in others.items() if key not in ("output", "call_id")}
        others |= _given(tool_call_id=item.get("tool_call_id", item.get("call_id")))
    if item.get("train", item.get("loss")) is False:  # axolotl's and others' for OpenAI's
        others["weight"] = 0
    message = {**others, "role": role, "content": text, **_given(reasoning_content=reasoning)}
    if calls:
        places = enumerate(calls)
        message["tool_calls"] = [_call(call, where, f"{at}.tool_calls[{place}]", tools) for place, call in places]
    return message


def is_blank(value: Any) -> bool:
    """Whether a value says nothing: null, empty, or an object of nulls, also as JSON text."""
    if isinstance(value, Mapping):
        return all(each is None for each in value.values())
    return value in _NOTHING or (is_list(value) and not value)


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
        text = next((part[key] for key in ("text", "refusal", *_REASONING) if key in part), "")
        if any(not is_blank(part.get(name)) for name in MEDIA):
            kind = "image"
        if kind in _THOUGHT_PARTS and isinstance(text, str):
            thought += text
        elif kind in _TEXT_PARTS and isinstance(text, str):
            said += text
        else:
            what = f"content of type '{kind}' cannot be shown to a language model"
            what = what if kind else "a part of the content must be a text"
            expected = 'text: {"type": "text", "text": ...}'
            raise wrong(what, where, f"{at}[{place}]", expected=expected, found=parts[place])
    return said, thought


def _tool_text(content: Any, where: str, at: str) -> str:
    """What a tool gave: text, parts of text, or a value, which becomes JSON."""
    parts = content if is_list(content) else ()
    kinds = [each.get("type") if isinstance(each, Mapping) else each for each in parts]
    if kinds and all(isinstance(kind, str) for kind in kinds):
        return _text(content, where, at)[0]
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def _call(value: Any, where: str, at: str, tools: Sequence[Tool] | None) -> dict[str, Any]:
    call = decoded(value)
    function = decoded(call.get("function") or call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise wrong("a tool call must be an object with a name", where, at, found=value)
    name, given = function["name"], next((function[key] for key in _ARGUMENTS if key in function), None)
    try:
        arguments = json.loads(given) if isinstance(given, str) and given not in _NOTHING else given
    except (ValueError, RecursionError):
        arguments = given
    if isinstance(arguments, list) and all(is_list(pair) and len(pair) == 2 for pair in arguments):  # a map of Arrow
        arguments = {str(key): each for key, each in arguments}
    arguments = {} if arguments in _NOTHING else arguments
    if not isinstance(arguments, Mapping):
        what = "the arguments of a call must be a JSON object"
        raise wrong(what, where, f"{at}.arguments", expected="an object", found=given)
    if tools is not None and not isinstance(given, str) and not isinstance(value, str):  # JSON text has no padding
        schemas = (tool["function"].get("parameters") for tool in tools if tool["function"]["name"] == name)
        arguments = _without_padding(arguments, next(schemas, None))
    known = {"type": "function", "function": {"name": name, "arguments": dict(arguments)}}
    return {**known, **_given(id=call.get("call_id") or call.get("id"))}


def _without_padding(value: Any, schema: Any) -> Any:
    """Arguments without nulls, but where a tool's schema takes one."""
    schema = schema if isinstance(schema, Mapping) else {}
    if isinstance(value, Mapping):
        known = schema.get("properties")
        of = {key: known.get(key) if isinstance(known, Mapping) else None for key in value}
        kept = {key: each for key, each in value.items() if each is not None or _takes_null(of[key])}
        return {key: _without_padding(each, of[key]) for key, each in kept.items()}
    return [_without_padding(each, schema.get("items")) for each in value] if is_list(value) else value


def _takes_null(schema: Any) -> bool:
    if not isinstance(schema, Mapping):
        return False
    kinds, values = schema.get("type"), schema.get("enum")
    listed = (isinstance(each, list) and null in each for each, null in ((kinds, "null"), (values, None)))
    named = kinds == "null" or any(listed)
    options = [each for key in ("anyOf", "oneOf") for each in schema.get(key) or ()]
    return named or schema.get("const", 0) is None or bool(schema.get("nullable")) or any(map(_takes_null, options))


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
        what, expected = "the text has half of a surrogate pair, which no tokenizer can read", "text in UTF-8"
        found = error.object[max(error.start - 20, 0) : error.end + 20]
        raise wrong(what, where, at, expected=expected, found=found) from error
