"""What a request is sampled with, and how its answer is read: no server, no generator."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from nemotron_steps.engine.rollouts.conversation import TurnFormat
from nemotron_steps.engine.serving.served_model import ApiError, Sampling, ServedModel
from nemotron_steps.engine.types import Completion, FinishReason, SamplingParams
from tests.models.stock_chats import stock_chat

CHAT: Any = SimpleNamespace(
    tokenizer=range(50),
    end_ids=(1,),
    decode=lambda tokens: "".join(chr(96 + token) for token in tokens),
    render=lambda messages, tools: [2] * len(messages),
    render_continuation=lambda messages, tools, turn_ended: [3 if turn_ended else 4] * len(messages),
)


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
