"""What a request is sampled with, and how its answer is read: no server, no generator."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from nemotron_steps.engine.rollouts.conversation import TurnFormat
from nemotron_steps.engine.serving import served_model as sampling
from nemotron_steps.engine.serving.apis import chat_completion, create_response, tokenize
from nemotron_steps.engine.serving.served_model import ApiError, Prompt, SamplerBridge, ServedModel, SharedFields
from nemotron_steps.engine.types import Completion, FinishReason, SamplingParams
from nemotron_steps.environments.http_server import EventStream

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


def model_of(bridge: Bridge, **defaults: Any) -> ServedModel:
    params = SamplingParams(8, temperature=0.5, top_p=0.9, top_k=4, stop_token_ids=(7,), **defaults)
    return ServedModel(
        bridge, CHAT, name="policy", max_total_length=20, turn_format=TurnFormat("none", "hermes"), defaults=params
    )  # type: ignore[arg-type]


def test_a_request_may_say_how_it_is_sampled_within_the_context() -> None:
    bridge = Bridge()
    model = model_of(bridge, stop_strings=("x",), seed=9)

    def answers(length: int, n: int = 1, stop: tuple[str, ...] = (), label: str | None = None, **fields: Any) -> int:
        async def run() -> int:
            most = fields.pop("max_tokens", None)
            request = SharedFields(**fields)
            asked = model.answers(Prompt([2] * length, None, ()), request, max_tokens=most, n=n, stop=stop, label=label)
            return len([answer async for answer in asked])

        return asyncio.run(run())

    answers(5)
    answers(15)
    own = {"max_tokens": 12, "temperature": 0.0, "top_p": 0.1, "top_k": 0, "seed": 3}
    assert answers(5, 2, ("y",), "mine", **own) == 2
    plain, long, asked = (params for params, _, _ in bridge.asked)
    assert (plain.max_new_tokens, plain.temperature, plain.top_p, plain.top_k) == (8, 0.5, 0.9, 4)
    assert (plain.stop_strings, plain.stop_token_ids, plain.seed) == (("x",), (7,), None)
    assert long.max_new_tokens == 5
    assert (asked.max_new_tokens, asked.temperature, asked.top_p, asked.top_k) == (12, 0.0, 0.1, 0)
    assert (asked.stop_strings, asked.seed) == (("x", "y"), 3)
    assert [request for _, _, request in bridge.asked] == ["http/0", "http/1", "mine"]


QUESTION = {"role": "user", "content": "x"}
TOOL = {"type": "function", "function": {"name": "f"}}


class Chat:
    """Letters are tokens; a message is rendered as one 2, one that goes on as 3, or as 4 where a turn had no end."""

    tokenizer = range(200)
    end_ids = (1,)

    def __init__(self) -> None:
        self.rendered: list[Any] = []

    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(token) for token in tokens)

    decode_token = staticmethod(chr)
    count_tokens = staticmethod(len)

    def render(self, messages: Any, tools: Any) -> list[int]:
        self.rendered.append(messages)
        return [2] * len(messages)

    def render_continuation(self, messages: Any, tools: Any, turn_ended: bool) -> list[int]:
        self.rendered.append(messages)
        return [3 if turn_ended else 4] * len(messages)


def served(text: str = "abc") -> tuple[ServedModel, Any, Chat]:
    bridge, chat = Bridge(), Chat()
    bridge.tokens = [ord(letter) for letter in text]
    model = ServedModel(
        bridge,  # type: ignore[arg-type]
        chat,  # type: ignore[arg-type]
        name="policy",
        max_total_length=99,
        turn_format=TurnFormat("qwen3", "hermes"),
        defaults=SamplingParams(8),
    )
    return model, bridge, chat


def ask(model: ServedModel, *messages: dict[str, Any], label: str | None = None, **fields: Any) -> Any:
    """The body of the answer; of a stream its events."""

    async def run() -> Any:
        answer = await chat_completion(model, {"messages": list(messages) or [QUESTION], **fields}, label)
        if not isinstance(answer, EventStream):
            return answer.body
        return [event if event == "[DONE]" else json.loads(event) async for event in answer.events]

    return asyncio.run(run())


def respond(model: ServedModel, items: Any = "x", label: str | None = None, **fields: Any) -> Any:
    return asyncio.run(create_response(model, {"input": items, **fields}, label)).body


def prompt(model: ServedModel, *messages: dict[str, Any]) -> list[int]:
    return tokenize(model, {"messages": list(messages)}).body["tokens"]


def test_a_conversation_that_was_streamed_is_known_as_one_that_was_not() -> None:
    answer = {"role": "assistant", "content": "abc"}
    for stream in (False, True):
        model, bridge, _ = served()
        ask(model, QUESTION, stream=stream)
        assert prompt(model, QUESTION, answer, QUESTION) == [2, *bridge.tokens, 4]


def test_of_several_recorded_turns_the_last_is_gone_on_from() -> None:
    def turn(before: list[int], said: list[int], **kind: Any) -> dict[str, Any]:
        return {"role": "assistant", "content": "a", "prompt_token_ids": before, "generation_token_ids": said, **kind}

    turns = [QUESTION, turn([5], [6]), QUESTION, turn([5, 6, 3], [7, 1]), QUESTION, QUESTION]
    model, _, chat = served()
    assert prompt(model, *turns) == [5, 6, 3, 7, 1, 3, 3]
    answer = respond(model, turns, instructions="be kind")  # they are in the recorded tokens
    assert answer["output"][-1]["prompt_token_ids"] == [5, 6, 3, 7, 1, 3, 3]
    assert chat.rendered == [[QUESTION] * 2] * 2


def test_what_breaks_in_a_stream_is_its_last_event_but_one() -> None:
    model, bridge, _ = served()

    async def samples(*asked: Any) -> Any:
        raise ApiError(500, "generation broke")
        yield

    bridge.samples = samples
    *_, error, end = ask(model, stream=True)
    assert error["error"]["message"] == "generation broke" and end == "[DONE]"


def test_a_request_that_the_run_drops_is_answered() -> None:
    async def first(bridge: SamplerBridge) -> Any:
        return await anext(bridge.samples([2], SamplingParams(1), 1, "r"))

    async def dropped() -> None:
        loop = asyncio.get_running_loop()

        def submit(*asked: Any) -> list[Any]:
            future = loop.create_future()
            future.cancel()
            return [future]

        bridge = SamplerBridge(SimpleNamespace(loop=loop, submit=submit, cancel_request=lambda name: None))  # type: ignore[arg-type]
        with pytest.raises(ApiError) as caught:
            async with asyncio.timeout(5):
                await first(bridge)
        assert (caught.value.status, caught.value.body["error"]["code"]) == (503, "dropped")
        assert not bridge._running  # its name is free again

    asyncio.run(dropped())


def test_a_request_that_outlives_the_run_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_POLL_SECONDS", 0.01)
    closed = iter([False, False, *[True] * 9])
    loop = SimpleNamespace(is_closed=lambda: next(closed), call_soon_threadsafe=lambda function: None)

    async def wait() -> None:
        bridge = SamplerBridge(SimpleNamespace(loop=loop))  # type: ignore[arg-type]
        async with asyncio.timeout(5):
            await anext(bridge.samples([2], SamplingParams(1), 1, "r"))

    with pytest.raises(ApiError, match="the run ended") as caught:
        asyncio.run(wait())
    assert caught.value.status == 503
