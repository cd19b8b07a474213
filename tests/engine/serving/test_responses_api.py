"""The Responses API over a real generator: items in, items out, tokens kept."""

import json

import pytest

from nemotron_steps.environments.responses import Response
from tests.engine.serving.taught_model import CALL, GREETING, QUESTION, TOOL
from tests.engine.serving.test_chat_api import call


def respond(endpoint, asked, **fields):
    status, answer = call(endpoint, "/v1/responses", {"input": asked, "temperature": 0, **fields})
    assert status == 200, answer
    return answer


def test_a_text_becomes_reasoning_and_message(endpoint, chat):
    answer = respond(endpoint, GREETING["content"])
    assert [item["type"] for item in answer["output"]] == ["reasoning", "message"]
    reasoning, message = answer["output"]
    assert reasoning["summary"] == [{"type": "summary_text", "text": "be kind"}]
    assert message["content"][0]["text"] == "Hi." and message["status"] == "completed"
    assert answer["status"] == "completed" and answer["usage"]["output_tokens_details"]["reasoning_tokens"] == 7
    assert message["prompt_token_ids"] == chat.render([GREETING])
    assert chat.decode(message["generation_token_ids"]) == "<think>be kind</think>Hi."
    assert len(message["generation_log_probs"]) == len(message["generation_token_ids"])
    assert set(message["generation_weight_versions"]) == {0}
    assert "generation_token_ids" not in reasoning
    # What environments read is the same as in the process.
    assert Response.from_output(answer["output"]).text == "Hi."


def test_a_tool_loop_keeps_every_sampled_token(endpoint, chat):
    first = respond(endpoint, [QUESTION], tools=[TOOL])
    reasoning, wanted = first["output"]
    assert (wanted["type"], wanted["name"], json.loads(wanted["arguments"])) == ("function_call", "add", {"by": 2})
    assert chat.decode(wanted["generation_token_ids"]) == CALL
    result = {"type": "function_call_output", "call_id": wanted["call_id"], "output": "now 2"}
    second = respond(endpoint, [QUESTION, reasoning, wanted, result], tools=[TOOL])
    assert [item["type"] for item in second["output"]] == ["message"]
    message = second["output"][0]
    assert message["content"][0]["text"] == "It is 2."
    prefix = wanted["prompt_token_ids"] + wanted["generation_token_ids"]
    assert message["prompt_token_ids"][: len(prefix)] == prefix
    # Without the recorded ids the conversation is known by what was said, reasoning or not.
    bare = {k: v for k, v in wanted.items() if "token" not in k and "generation" not in k}
    for told in ([QUESTION, reasoning, bare, result], [QUESTION, bare, result]):
        again = respond(endpoint, told, tools=[TOOL])
        assert again["output"][-1]["prompt_token_ids"] == message["prompt_token_ids"]


def test_truncation_and_instructions(endpoint, chat):
    answer = respond(endpoint, "hello", max_output_tokens=3, instructions="Be brief.", return_token_ids=False)
    assert answer["status"] == "incomplete" and answer["incomplete_details"] == {"reason": "max_output_tokens"}
    system = {"role": "system", "content": "Be brief."}
    assert answer["usage"]["input_tokens"] == len(chat.render([system, GREETING]))
    assert all("generation_token_ids" not in item for item in answer["output"])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"input": [{**GREETING, "prompt_token_ids": "x", "generation_token_ids": [1]}]}, "input.0"),
    ],
)
def test_bad_requests_name_the_field(endpoint, body, param):
    status, answer = call(endpoint, "/v1/responses", body)
    assert (status, answer["error"]["param"]) == (400, param), answer
    assert answer["error"]["type"] == "invalid_request_error"


def test_nulls_count_as_absent_as_in_published_rows(endpoint):
    answer = respond(endpoint, "hello", background=None, include=None, top_logprobs=None, stream=None, truncation=None)
    assert answer["output"][-1]["content"][0]["text"] == "Hi."
