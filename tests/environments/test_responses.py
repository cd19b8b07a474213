from typing import Any

import pytest

from nemotron_steps.environments.responses import (
    Response,
    ToolCall,
    conversation,
    last_user_text,
    message_item,
    reasoning_item,
    response_object,
    split_reasoning,
)

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "input_text", "text": "a"}, "b"]},
    {"type": "reasoning", "summary": []},
    {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "1"},
    {"type": "function_call_output", "call_id": "1", "output": "seven"},
    {"type": "message", "role": "assistant", "content": "done"},
]


def test_a_conversation_is_roles_and_texts() -> None:
    row = {"responses_create_params": {"input": MESSAGES}}
    assert [(m["role"], m["content"]) for m in conversation(row)] == [
        ("system", "s"), ("user", "ab"), ("assistant", "f({})"), ("tool", "seven"), ("assistant", "done"),
    ]  # fmt: skip
    assert last_user_text({"responses_create_params": {"input": MESSAGES[:5]}}) == "ab"
    assert last_user_text({"responses_create_params": {"input": MESSAGES[:1]}}) == ""
    assert last_user_text({"responses_create_params": {"input": "hi"}}) == "hi"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("<think> a </think> b ", ("a", "b")),
        ("a</think>b", ("a", "b")),
        ("<think>a", ("a", "")),
        ("b <think>a", ("", "b <think>a")),
        ("<think>a<think>b</think>c</think>d", ("a<think>b", "c</think>d")),
    ],
)
def test_reasoning_is_what_stands_before_the_closing_tag(text: str, parts: tuple[str, str]) -> None:
    assert split_reasoning(text) == parts


def test_arguments_are_an_object_or_nothing() -> None:
    found = [ToolCall("f", text).parsed_arguments() for text in ('{"a": 1}', "", "[1]", "{", "[" * 9999, "1" * 9999)]
    assert found == [{"a": 1}, {}, None, None, None, None]


def test_a_rollout_becomes_a_complete_response() -> None:
    items = [
        reasoning_item("r"),
        message_item("m"),
        {"type": "function_call", "name": "f", "arguments": "{}", "call_id": ""},
        {"type": "function_call", "name": "g", "arguments": "{}", "call_id": "own", "id": "mine", "status": "failed"},
    ]
    made = response_object(Response("m", output=items, truncated=True))
    assert [item["id"] for item in made["output"]] == ["item_0", "item_1", "item_2", "mine"]
    assert [item.get("status") for item in made["output"]] == [None, "completed", "completed", "failed"]
    assert [item.get("call_id") for item in made["output"]] == [None, None, "call_2", "own"]
    assert made["incomplete_details"] == {"reason": "max_output_tokens"}
    bare = response_object(Response("m", reasoning="r"))
    assert [item["type"] for item in bare["output"]] == ["reasoning", "message"]
    assert bare["output"][1]["content"][0]["text"] == "m" and bare["incomplete_details"] is None
    assert [item["type"] for item in response_object(Response("m"))["output"]] == ["message"]
    assert items[2]["call_id"] == "" and "id" not in items[0]  # what was given is left as it was


def test_a_rollout_is_read_from_its_items_in_their_order() -> None:
    items = [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "r1"}]},
        {"role": "assistant", "content": "<think>r2</think>said"},
        {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "1"},
        {"type": "function_call_output", "call_id": "1", "output": "o"},
        {"type": "function_call", "name": "g"},
        {"role": "user", "content": "more"},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "r3"}]},
        {"type": "message", "content": [{"type": "output_text", "text": "end"}]},
        {"type": "message", "role": "user", "content": "asked for more, and cut off"},
    ]
    found = Response.from_output(items, truncated=True, num_answer_tokens=2, num_reasoning_tokens=3)
    assert (found.text, found.reasoning) == ("end", "r1\nr2\nr3")
    assert found.tool_calls == [ToolCall("f", "{}", "1"), ToolCall("g", "", "")]
    assert (found.truncated, found.num_answer_tokens, found.num_reasoning_tokens) == (True, 2, 3)
    assert found.output == items and found.output[0] is not items[0]
    assert Response.from_output([]).text == "" and not Response.from_output([]).truncated
