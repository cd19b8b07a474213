"""What a request is sampled with, and how its answer is read: no server, no generator."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel

from nemotron_steps.engine.rollouts.conversation import TurnFormat
from nemotron_steps.engine.serving.served_model import ApiError, Begun, Sampling, ServedModel, parse_body
from nemotron_steps.engine.types import Completion, FinishReason, SamplingParams
from tests.models.stock_chats import stock_chat

CHAT: Any = SimpleNamespace(
    tokenizer=range(50),
    end_ids=(1,),
    decode=lambda tokens: "".join(chr(96 + token) for token in tokens),
    render=lambda messages, tools: [2] * len(messages),
    render_continuation=lambda messages, tools, turn_ended: [3 if turn_ended else 4] * len(messages),
)


class _Body(BaseModel):
    a: int = 1
    b: int = 1


CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


class Bridge:
    """Answers every request with the tokens it is told."""

    def __init__(self, text: str = "abcabc", reason: FinishReason = FinishReason.STOP) -> None:
        self.tokens, self.reason = [ord(letter) - 96 for letter in text], reason
        self.asked: list[Any] = []

    async def samples(self, prompt: Any, params: SamplingParams, n: int, request_id: str) -> Any:
        self.asked.append((params, n, request_id))
        for index in range(n):
            yield Completion(request_id, index, self.tokens, [0.0] * len(self.tokens), self.reason, [], None)


def served(bridge: Bridge, **defaults: Any) -> ServedModel:
    params = SamplingParams(8, temperature=0.5, top_p=0.9, top_k=4, stop_token_ids=(7,), **defaults)
    return ServedModel(
        bridge, CHAT, name="policy", max_total_length=20, turn_format=TurnFormat("none", "hermes"), defaults=params
    )  # type: ignore[arg-type]


def answers(model: ServedModel, prompt: list[int], sampling: Sampling, tools: Any = None) -> list[Any]:
    async def run() -> list[Any]:
        return [answer async for answer in model.answers(prompt, sampling, tools)]

    return asyncio.run(run())


def test_a_request_may_say_how_it_is_sampled_within_the_context() -> None:
    bridge = Bridge()
    model = served(bridge, stop_strings=("x",), seed=9)
    answers(model, [2] * 5, Sampling())
    answers(model, [2] * 15, Sampling())
    own = Sampling(n=2, max_tokens=12, temperature=0.0, top_p=0.1, top_k=0, stop=("y",), seed=3, label="mine")
    assert len(answers(model, [2] * 5, own)) == 2
    plain, long, asked = (params for params, _, _ in bridge.asked)
    assert (plain.max_new_tokens, plain.temperature, plain.top_p, plain.top_k) == (8, 0.5, 0.9, 4)
    assert (plain.stop_strings, plain.stop_token_ids, plain.seed) == (("x",), (7,), None)
    assert long.max_new_tokens == 5
    assert (asked.max_new_tokens, asked.temperature, asked.top_p, asked.top_k) == (12, 0.0, 0.1, 0)
    assert (asked.stop_strings, asked.seed) == (("x", "y"), 3)
    assert [request for _, _, request in bridge.asked] == ["http/0", "http/1", "mine"]


def test_equal_seeded_requests_have_one_name_and_others_another() -> None:
    bridge = Bridge()
    model = served(bridge)
    for prompt, seed in (([2, 3], 1), ([2, 3], 1), ([2, 3], 2), ([23], 1)):
        answers(model, prompt, Sampling(seed=seed))
    names = [request for _, _, request in bridge.asked]
    assert names[0] == names[1] and len(set(names)) == 3


@pytest.mark.parametrize(
    ("stops", "text"), [((), "abcabc"), (("bc",), "a"), (("ca", "bc"), "a"), (("ca",), "ab"), (("z",), "abcabc")]
)
def test_an_answer_ends_before_the_first_stop_string(stops: tuple[str, ...], text: str) -> None:
    (answer,) = answers(served(Bridge()), [2], Sampling(stop=stops))
    assert answer.turn.text == text and answer.finish_reason == "stop"


def test_calls_are_read_where_tools_are_offered() -> None:
    bridge = Bridge()
    bridge.tokens = [ord(letter) - 96 for letter in CALL]
    model = served(bridge)
    (answer,) = answers(model, [2], Sampling(), [{"name": "f"}])
    assert answer.finish_reason == "tool_calls" and [call.name for call in answer.turn.tool_calls] == ["f"]
    (unread,) = answers(model, [2], Sampling())
    assert unread.turn.text == CALL and unread.finish_reason == "stop"
    for reason in (FinishReason.LENGTH, FinishReason.ABORT):  # neither ended by itself
        (cut,) = answers(served(Bridge("a", reason)), [2], Sampling())
        assert cut.finish_reason == "length"
    (again,) = answers(model, [2], Sampling(), [{"name": "f"}])
    assert again.turn.tool_calls[0].call_id != answer.turn.tool_calls[0].call_id


def test_a_prompt_goes_on_from_recorded_tokens_or_is_rendered() -> None:
    model = served(Bridge())
    said: list[Any] = [{"role": "user", "content": "x"}]
    assert model.prompt_ids(said, [], None, "messages") == [2]
    for last, end in ((1, 3), (7, 3), (8, 4)):  # the end of a turn, another stop token, neither
        assert model.prompt_ids(said, [], Begun([5, last], 1), "messages") == [5, last, end]
    for wrong, code in (([-1], "invalid_value"), ([50], "invalid_value"), ([2] * 19, "context_length_exceeded")):
        with pytest.raises(ApiError) as caught:
            model.prompt_ids(said, [], Begun(wrong, 1), "messages")
        assert (caught.value.status, caught.value.body["error"]["code"]) == (400, code)
    assert len(model.prompt_ids(said, [], Begun([2] * 18, 1), "messages")) == 19
    with pytest.raises(ApiError, match="no message"):
        model.prompt_ids([], [], None, "messages")


def test_only_this_model_is_here() -> None:
    model = served(Bridge())
    model.check_name(None)
    model.check_name("policy")
    with pytest.raises(ApiError) as caught:
        model.check_name("gpt")
    assert caught.value.status == 404


@pytest.mark.parametrize(
    ("status", "kind", "waits"),
    [(400, "invalid_request_error", False), (500, "server_error", False), (503, "server_error", True)],
)
def test_an_error_says_whose_it_is_and_when_to_come_again(status: int, kind: str, waits: bool) -> None:
    reply = ApiError(status, "m", param="p", code="c").reply()
    assert reply.status == status and reply.body["error"] == {"message": "m", "type": kind, "param": "p", "code": "c"}
    assert bool(dict(reply.headers).get("Retry-After")) is waits
    assert parse_body(_Body, {"a": None, "b": 2}) == _Body(b=2)


def test_a_request_whose_tools_the_template_does_not_write_is_refused() -> None:
    chat = stock_chat("qwen3")
    chat.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    model = ServedModel(
        Bridge(), chat, name="x", max_total_length=99, turn_format=TurnFormat(), defaults=SamplingParams(8)
    )  # type: ignore[arg-type]
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    with pytest.raises(ApiError, match=r"^the chat template leaves out the tool `add`$") as caught:
        model.prompt_ids([{"role": "user", "content": "x"}], [tool], None, "messages")
    assert caught.value.status == 400
