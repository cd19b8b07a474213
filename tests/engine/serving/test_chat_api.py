"""Chat completions over a real generator and a real socket."""

import http.client
import json
import socket
import time
from urllib.parse import urlsplit

import pytest

from nemotron_steps.engine.generation.sampler import AsyncSampler
from nemotron_steps.engine.serving.endpoint import Endpoint
from nemotron_steps.engine.types import SamplingParams
from tests.engine.serving.taught_model import GREETING, MAX_LENGTH, QUESTION, REPLY, RESULT, TOOL, embedded

CALLED = {"type": "function", "function": {"name": "add", "arguments": {"by": 2}}}
NESTED_TOOL = {"type": "function", "function": {k: v for k, v in TOOL.items() if k != "type"}}


def call(endpoint, path, body=None, headers=None, raw=None):
    """(status, parsed JSON or raw text) of one request."""
    parts = urlsplit(endpoint.url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)
    data = raw if raw is not None else (None if body is None else json.dumps(body).encode())
    connection.request("GET" if data is None else "POST", path, data, headers or {})
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response.status, json.loads(text) if response.headers["Content-Type"] == "application/json" else text


def complete(endpoint, messages, **fields):
    body = {"messages": messages, "temperature": 0, **fields}
    status, answer = call(endpoint, "/v1/chat/completions", body)
    assert status == 200, answer
    return answer


def test_models_and_health(endpoint):
    status, models = call(endpoint, "/v1/models")
    assert status == 200 and [(m["id"], m["max_model_len"]) for m in models["data"]] == [("tiny", 256)]
    assert call(endpoint, "/health")[0] == 200
    assert endpoint.url.startswith("http://127.0.0.1:")


def test_a_completion_has_the_generators_own_tokens_and_logprobs(endpoint, chat):
    answer = complete(endpoint, [GREETING], model="tiny", logprobs=True, return_token_ids=True)
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hi.", "reasoning_content": "be kind"}
    assert choice["finish_reason"] == "stop"
    assert answer["prompt_token_ids"] == chat.render([GREETING])
    assert choice["token_ids"] == [*chat.tokenizer.encode(REPLY, add_special_tokens=False), chat.tokenizer.eos_token_id]
    entries = choice["logprobs"]["content"]
    assert [e["token"] for e in entries] == [chat.decode_token(i) for i in choice["token_ids"]]
    assert all(-0.5 < e["logprob"] <= 0 for e in entries)
    assert answer["usage"] == {
        "prompt_tokens": len(answer["prompt_token_ids"]),
        "completion_tokens": len(choice["token_ids"]),
        "total_tokens": len(answer["prompt_token_ids"]) + len(choice["token_ids"]),
    }


def test_tool_calls_are_read_and_tool_choice_none_hides_the_tools(endpoint):
    answer = complete(endpoint, [QUESTION], tools=[NESTED_TOOL])
    (choice,) = answer["choices"]
    (tool_call,) = choice["message"]["tool_calls"]
    assert tool_call["function"]["name"] == "add" and json.loads(tool_call["function"]["arguments"]) == {"by": 2}
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    hidden = complete(endpoint, [QUESTION], tools=[NESTED_TOOL], tool_choice="none", max_tokens=5)
    assert hidden["usage"]["prompt_tokens"] < answer["usage"]["prompt_tokens"]
    assert "tool_calls" not in hidden["choices"][0]["message"]


def test_a_follow_up_keeps_the_sampled_tokens_whether_it_carries_them_or_not(endpoint, chat):
    """The template shows no reasoning of earlier turns, so the chat tokenised again would be another prompt."""
    first = complete(endpoint, [QUESTION], tools=[NESTED_TOOL], return_token_ids=True)
    message = first["choices"][0]["message"]
    told = [QUESTION, message, {**RESULT, "tool_call_id": message["tool_calls"][0]["id"]}]
    plain = complete(endpoint, told, tools=[NESTED_TOOL], return_token_ids=True)
    recorded = {
        **message,
        "prompt_token_ids": first["prompt_token_ids"],
        "generation_token_ids": first["choices"][0]["token_ids"],
    }
    second = complete(endpoint, [QUESTION, recorded, told[2]], tools=[NESTED_TOOL], return_token_ids=True)
    prefix = first["prompt_token_ids"] + first["choices"][0]["token_ids"]
    assert second["prompt_token_ids"][: len(prefix)] == prefix
    assert plain["prompt_token_ids"] == second["prompt_token_ids"]
    rendered_again = chat.render([QUESTION, {**message, "tool_calls": [CALLED]}, RESULT], [TOOL])
    assert rendered_again[: len(prefix)] != prefix
    assert chat.decode(second["prompt_token_ids"][len(prefix) :]).endswith("tool\nnow 2\nassistant\n")
    assert second["choices"][0]["message"]["content"] == "It is 2."
    # A turn that was cut off gets the end token that the template would write.
    cut = {**recorded, "generation_token_ids": recorded["generation_token_ids"][:7]}
    third = complete(endpoint, [QUESTION, cut, told[2]], tools=[NESTED_TOOL], return_token_ids=True, max_tokens=1)
    assert third["prompt_token_ids"][len(first["prompt_token_ids"]) + 7] == chat.tokenizer.eos_token_id


def test_n_choices_seeds_and_stop(endpoint):
    fields = {"temperature": 1.5, "max_tokens": 12, "n": 4, "return_token_ids": True}
    first, again, other = (complete(endpoint, [GREETING], seed=seed, **fields)["choices"] for seed in (7, 7, 8))
    assert [c["index"] for c in first] == [0, 1, 2, 3]
    assert [c["token_ids"] for c in first] == [c["token_ids"] for c in again] != [c["token_ids"] for c in other]
    assert len({tuple(c["token_ids"]) for c in first}) > 1
    stopped = complete(endpoint, [GREETING], stop=["H"])["choices"][0]
    assert (stopped["message"]["content"], stopped["finish_reason"]) == ("", "stop")
    cut = complete(endpoint, [GREETING], max_tokens=2)["choices"][0]
    assert cut["finish_reason"] == "length"
    newer = complete(endpoint, [GREETING], max_tokens=9, max_completion_tokens=2, return_token_ids=True)["choices"][0]
    assert (len(newer["token_ids"]), newer["finish_reason"]) == (2, "length")  # it took the other's place


def test_tokenize_and_tokens_as_ids_as_nemo_gym_asks(endpoint):
    status, answer = call(endpoint, "/tokenize", {"messages": [QUESTION], "tools": [NESTED_TOOL]})
    whole = complete(
        endpoint, [QUESTION], tools=[NESTED_TOOL], logprobs=True, return_tokens_as_token_ids=True, return_token_ids=True
    )
    assert status == 200 and answer["tokens"] == whole["prompt_token_ids"]
    ids = [int(e["token"].removeprefix("token_id:")) for e in whole["choices"][0]["logprobs"]["content"]]
    assert ids == whole["choices"][0]["token_ids"]


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "messages"),
        ({"messages": [GREETING], "model": "other"}, 404, "model"),
        ({"messages": [GREETING], "temprature": 1}, 400, "temprature"),
        ({"messages": [GREETING], "tools": [{"type": "function"}]}, 400, "tools.0.function"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            400,
            "messages.0.tool_calls.0.arguments",
        ),
        ({"messages": [{"role": "user", "content": "long " * 100}]}, 400, "messages"),
        (
            {
                "messages": [
                    {"role": "assistant", "prompt_token_ids": [1], "generation_token_ids": [10**6]},
                    GREETING,
                ]
            },
            400,
            "messages",
        ),
    ],
)
def test_bad_requests_name_the_field(endpoint, body, status, param):
    got, answer = call(endpoint, "/v1/chat/completions", body)
    assert (got, answer["error"]["param"]) == (status, param), answer
    assert answer["error"]["message"] and answer["error"]["type"] == "invalid_request_error"


def test_what_is_no_request_is_refused(endpoint):
    assert call(endpoint, "/v1/chat/completions", raw=b"not json")[0] == 400
    assert call(endpoint, "/v1/chat/completions", raw=b"[]")[0] == 400
    assert call(endpoint, "/v1/embeddings", {})[0] == 404
    assert call(endpoint, "/v1/models", {})[0] == 405
    parts = urlsplit(endpoint.url)
    for raw, status in (
        (b"nonsense\r\n\r\n", b"400"),
        (b"POST /v1/models HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n", b"413"),
        (b"POST /v1/models HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", b"400"),
        (b"GET /" + b"x" * 70_000, b"400"),
    ):
        with socket.create_connection((parts.hostname, parts.port), timeout=10) as connection:
            connection.sendall(raw)
            assert connection.recv(100).split(b" ")[1] == status


def test_before_anything_can_be_generated_the_answer_is_to_come_again(taught, chat):
    generator = embedded(taught, chat)
    unbound = AsyncSampler(generator, name="served")
    with Endpoint(unbound, chat, name="tiny", max_total_length=MAX_LENGTH, defaults=SamplingParams(8)) as endpoint:
        status, answer = call(endpoint, "/v1/chat/completions", {"messages": [GREETING]})
    generator.close()
    assert (status, answer["error"]["code"]) == (503, "not_ready")


def test_a_client_that_goes_away_stops_its_generation(endpoint):
    parts = urlsplit(endpoint.url)
    request = {"messages": [QUESTION], "n": 128, "temperature": 5, "max_tokens": 230, "seed": 1}
    whole = complete(endpoint, **request)["usage"]["completion_tokens"]
    before = endpoint._sampler.generated_tokens
    body = json.dumps(request).encode()
    connection = socket.create_connection((parts.hostname, parts.port), timeout=10)
    connection.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    )
    deadline = time.monotonic() + 10
    while endpoint.generator.pending() == 0:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    connection.close()
    while endpoint.generator.pending():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    # The samples were dropped, not finished for nobody: finished ones alone are counted.
    assert endpoint._sampler.generated_tokens - before < whole
    assert complete(endpoint, [GREETING])["choices"][0]["message"]["content"] == "Hi."
