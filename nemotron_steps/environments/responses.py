"""What a policy answered, in one shape: text, reasoning, tool calls, and the OpenAI Responses output items.

Also the few readers of that shape (message text, conversation of a row) that every environment shares.
Not a client and not a parser of answers: each environment extracts its own answer.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nemotron_steps.rows.layouts import read_request
from nemotron_steps.rows.messages import texts_of

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"

TEXT_PART_TYPES = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})


def json_of(text: str) -> Any:
    """JSON that a model wrote."""
    return finite(json.loads(text))


def finite(value: Any) -> Any:
    """Parsed data as it is: no bound of a schema and no tolerance is for numbers that no float holds."""
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, Mapping):
            if not all(isinstance(key, str) for key in each):
                raise ValueError("a key that is not a string")
            left.extend(each.values())
        elif isinstance(each, list | tuple | set | frozenset):
            left.extend(each)
        elif isinstance(each, int | float) and not abs(each) <= sys.float_info.max:
            raise ValueError("a number that is not finite")
    return value


@dataclass(frozen=True)
class ToolCall:
    """One function call of an assistant turn. `arguments` is the JSON text exactly as the model wrote it."""

    name: str
    arguments: str
    call_id: str = ""

    def parsed_arguments(self) -> dict[str, Any] | None:
        """The arguments as an object, or None when they are not valid JSON or not an object."""
        try:
            value = json_of(self.arguments or "{}")
        except (ValueError, RecursionError):  # ValueError also for a number with too many digits
            return None
        return value if isinstance(value, dict) else None


@dataclass
class Response:
    """One rollout as an environment sees it.

    Attributes:
        text: the final answer, without reasoning; the last assistant message.
        reasoning: the text inside the think tags, "" when there was none.
        tool_calls: every function call, in order.
        output: OpenAI Responses output items (reasoning, message, function_call, function_call_output).
        num_answer_tokens: tokens of `text`, None when they were not counted.
        num_reasoning_tokens: tokens of `reasoning`, likewise.
        truncated: the token limit cut the rollout.
    """

    text: str
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    output: list[dict[str, Any]] = field(default_factory=list)
    num_answer_tokens: int | None = None
    num_reasoning_tokens: int | None = None
    truncated: bool = False

    @classmethod
    def from_text(cls, text: str, **more: Any) -> Response:
        """A single assistant turn from its decoded text; reasoning is split off at the think tags. `more`: as
        from_output."""
        reasoning, answer = split_reasoning(text)
        thought = [reasoning_item(reasoning)] if reasoning else []
        return cls(answer, reasoning, [], [*thought, message_item(answer)], **more)

    @classmethod
    def from_output(
        cls,
        output: Sequence[Mapping[str, Any]],
        *,
        truncated: bool = False,
        num_answer_tokens: int | None = None,
        num_reasoning_tokens: int | None = None,
    ) -> Response:
        """A rollout of any number of turns from its Responses output items."""
        text = ""
        reasoning: list[str] = []
        calls: list[ToolCall] = []
        for item in output:
            kind = item.get("type", "message")
            if kind == "reasoning":
                reasoning.append(content_text(item.get("summary") or item.get("content")))
            elif kind == "function_call":
                calls.append(ToolCall(*(text_of(item.get(key, "")) for key in ("name", "arguments", "call_id"))))
            elif kind == "message" and item.get("role", "assistant") == "assistant":
                thought, text = split_reasoning(content_text(item.get("content")))
                if thought:
                    reasoning.append(thought)
        thoughts, items = "\n".join(filter(None, reasoning)), [dict(item) for item in output]
        return cls(text, thoughts, calls, items, num_answer_tokens, num_reasoning_tokens, truncated)


def split_reasoning(text: str, open_tag: str = THINK_OPEN, close_tag: str = THINK_CLOSE) -> tuple[str, str]:
    """(reasoning, answer) of one assistant turn. A lone closing tag ends the reasoning, as templates put the opening
    one into the prompt; one that is never closed means that the thinking was cut, and the answer is empty."""
    before, closed, after = text.partition(close_tag)
    if closed:
        return before.replace(open_tag, "", 1).strip(), after.strip()
    prefix, opened, rest = text.partition(open_tag)
    if opened and not prefix.strip():
        return rest.strip(), ""
    return "", text


def content_text(content: Any) -> str:
    """Text of a message's content, which may be a string, a list of strings or parts, or None."""
    if content is None or isinstance(content, str):
        return content or ""
    said = ""
    for part in [content] if isinstance(content, Mapping) else content:
        text = part
        if not isinstance(part, str):
            text = part.get("text") if part.get("type", "text") in TEXT_PART_TYPES else ""
        said += text if isinstance(text, str) else ""
    return said


def text_of(value: Any, limit: int | None = None, form: Callable[[Any], str] = str) -> str:
    """The beginning of a value that others sent, as text: a text itself, and the type of what cannot be written out."""
    try:
        return form(value)[:limit]
    except (ValueError, RecursionError):  # too many digits, or too deep
        return type(value).__name__


def conversation(row: Mapping[str, Any]) -> list[dict[str, str]]:
    """The messages of a row's prompt as role and text, calls as `name({arguments})`. DataError: it cannot be read."""
    return [{"role": m["role"], "content": texts_of(m)} for m in read_request(row, "row").messages]


def last_user_text(row: Mapping[str, Any]) -> str:
    """Text of the last user message of a row, "" when there is none."""
    users = [message["content"] for message in conversation(row) if message["role"] == "user"]
    return users[-1] if users else ""


def message_item(text: str, role: str = "assistant") -> dict[str, Any]:
    """A Responses message item."""
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "role": role, "status": "completed", "content": content}


def reasoning_item(text: str) -> dict[str, Any]:
    """A Responses reasoning item."""
    return {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}


def response_object(response: Response) -> dict[str, Any]:
    """The rollout as a complete OpenAI Responses object, ids filled in, as resources servers validate it."""
    thought = [reasoning_item(response.reasoning)] if response.reasoning else []
    items = response.output or [*thought, message_item(response.text)]
    output = []
    for index, item in enumerate(items):
        filled = {"id": f"item_{index}", **item}
        if filled.get("type") in ("message", "function_call"):
            filled.setdefault("status", "completed")
        if filled.get("type") == "function_call":
            filled["call_id"] = filled.get("call_id") or f"call_{index}"
        output.append(filled)
    return {
        "id": "resp_0",
        "object": "response",
        "created_at": 0.0,
        "model": "policy",
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "incomplete_details": {"reason": "max_output_tokens"} if response.truncated else None,
    }


def function_call_output_item(call_id: str, output: str) -> dict[str, Any]:
    """A Responses tool result item."""
    return {"type": "function_call_output", "call_id": call_id, "output": output}
