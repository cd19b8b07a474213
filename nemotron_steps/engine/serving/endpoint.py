"""A generator behind an OpenAI-compatible endpoint, in a thread of its own.

/health  /v1/models  /v1/chat/completions  /v1/responses  /tokenize     under vLLM's names for token ids

The last output item of a response carries NeMo-Gym's token fields, so that an agent's next request continues exactly
those tokens.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Literal

from pydantic import Field, field_validator

from nemotron_steps.engine.generation.sampler import AsyncSampler
from nemotron_steps.engine.rollouts.conversation import DEFAULT_FORMAT, TurnFormat
from nemotron_steps.engine.serving.served_model import (
    Answer,
    ApiError,
    ApiModel,
    Begun,
    Chat,
    ServedModel,
    SharedFields,
    not_ready,
    parse_body,
    refused,
    said_in_chat,
    said_in_item,
)
from nemotron_steps.engine.types import SamplingParams
from nemotron_steps.environments.http_server import HttpServer, Reply, Request
from nemotron_steps.environments.loop_thread import LoopThread
from nemotron_steps.errors import DataError
from nemotron_steps.models.chat import ChatFormat
from nemotron_steps.rows.layouts import read_request
from nemotron_steps.rows.messages import read_messages

_LOG = logging.getLogger(__name__)


class FunctionDefinition(ApiModel):
    """A function a tool offers."""

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] = Field(default_factory=dict)
    strict: bool | None = None


class ChatTool(ApiModel):
    """A function tool, nested as the chat API writes it."""

    type: Literal["function"]
    function: FunctionDefinition


class ChatPrompt(SharedFields):
    """The chat itself."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[ChatTool] = Field(default_factory=list)


class ChatRequest(ChatPrompt):
    """Body of /v1/chat/completions."""

    n: int = Field(1, ge=1, le=256)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    stop: list[str] = Field(default_factory=list)
    logprobs: bool = False
    response_format: dict[Literal["type"], Literal["text"]] | None = None
    presence_penalty: Literal[0] = 0
    frequency_penalty: Literal[0] = 0
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("stop")
    @classmethod
    def _not_empty(cls, value: list[str]) -> list[str]:
        if "" in value:
            raise ValueError("a stop string is empty")
        return value

    @field_validator("presence_penalty", "frequency_penalty", mode="before")
    @classmethod
    def _zero(cls, value: Any) -> Any:
        return 0 if value == 0 else value


class TokenizeRequest(ChatPrompt):
    """Body of /tokenize, vLLM's."""

    add_generation_prompt: Literal[True] = True


class ResponsesTool(ApiModel):
    """A function tool, flat as the Responses API writes it."""

    type: Literal["function"]
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TextFormat(ApiModel):
    """Only free text is generated."""

    format: dict[Literal["type"], Literal["text"]] | None = None


class ResponsesRequest(SharedFields):
    """Body of /v1/responses."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    tools: list[ResponsesTool] = Field(default_factory=list)
    max_output_tokens: int | None = Field(None, ge=1)
    text: TextFormat | None = None
    truncation: Literal["disabled"] = "disabled"
    background: Literal[False] = False
    include: list[str] = Field(default_factory=list, max_length=0)
    return_token_ids: bool = True


async def chat_completion(model: ServedModel, body: dict[str, Any], request_id: str | None) -> dict[str, Any]:
    """Answer one chat."""
    request = parse_body(ChatRequest, body)
    chat, prompt_ids = _chat_prompt(model, request)
    answers = await model.answers(
        prompt_ids,
        request,
        max_tokens=request.max_completion_tokens or request.max_tokens,
        label=request_id,
        n=request.n,
        stop=request.stop,
    )
    choices = []
    for answer in answers:
        message = _message(request, answer)
        model.conversations.remember(chat, [said_in_chat(message)], prompt_ids, answer.completion.token_ids)
        choice = {"index": answer.completion.index, "message": message, "finish_reason": answer.finish_reason}
        choices.append(choice | _tokens(model, request, answer))
    sampled = sum(len(answer.completion.token_ids) for answer in answers)
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "created": int(time.time()),
        "model": model.name,
        "object": "chat.completion",
        "choices": choices,
        "usage": {
            "prompt_tokens": len(prompt_ids),
            "completion_tokens": sampled,
            "total_tokens": len(prompt_ids) + sampled,
        },
        **({"prompt_token_ids": prompt_ids} if request.return_token_ids else {}),
    }


async def tokenize(model: ServedModel, body: dict[str, Any], request_id: str | None) -> dict[str, Any]:
    """Token ids of a chat, ready to sample from."""
    _, ids = _chat_prompt(model, parse_body(TokenizeRequest, body))
    return {"count": len(ids), "max_model_len": model.max_total_length, "tokens": ids}


def _check_name(model: ServedModel, asked: str | None) -> None:
    if asked is not None and asked != model.name:
        what = f"no model is named {asked!r}; this is {model.name!r}"
        raise ApiError(404, what, param="model", code="model_not_found")


def _chat_prompt(model: ServedModel, request: ChatPrompt) -> tuple[Chat, list[int]]:
    _check_name(model, request.model)
    begun = None
    for position, message in enumerate(request.messages):
        if message.get("role") == "assistant" and message.get("generation_token_ids"):
            begun = Begun(_recorded_ids(message, f"messages.{position}"), position + 1)
    chat = Chat.of(request.messages, said_in_chat, request.offered)
    begun = begun or model.begun(chat)
    after = begun.count if begun is not None else 0
    for position, message in enumerate(request.messages):
        if message.get("role") not in ("system", "developer", "user", "assistant", "tool"):
            raise ApiError(400, f"unknown role {message.get('role')!r}", param=f"messages.{position}.role")
    try:
        asked = request.messages[after:]
        messages = read_messages(asked, "request", "messages", start=after) if asked else []
    except DataError as error:
        raise refused(error, "messages") from error
    return chat, model.prompt_ids(messages, request.offered, begun, "messages")


def _recorded_ids(turn: Mapping[str, Any], param: str) -> list[int]:
    """The exact tokens that a message or item carries, of its prompt and of itself."""
    parts = [turn.get(name) for name in ("prompt_token_ids", "generation_token_ids")]
    if not all(isinstance(ids, list) and ids and all(type(i) is int for i in ids) for ids in parts):
        what = "recorded token ids need prompt_token_ids and generation_token_ids, lists of integers"
        raise ApiError(400, what, param=param)
    return [token for ids in parts if ids is not None for token in ids]


def _message(request: ChatRequest, answer: Answer) -> dict[str, Any]:
    turn = answer.turn
    calls = turn.tool_calls if request.parallel_tool_calls else turn.tool_calls[:1]
    message: dict[str, Any] = {"role": "assistant", "content": turn.text if turn.text or not calls else None}
    if turn.reasoning:
        message["reasoning_content"] = turn.reasoning
    if calls:
        message["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    return message


def _tokens(model: ServedModel, request: ChatRequest, answer: Answer) -> dict[str, Any]:
    """The token fields of a choice."""
    fields: dict[str, Any] = {"logprobs": None}
    if request.logprobs:
        entries = []
        for token_id, logprob in zip(answer.completion.token_ids, answer.completion.logprobs, strict=True):
            as_id = request.return_tokens_as_token_ids
            token = f"token_id:{token_id}" if as_id else model.chat.decode_token(token_id)
            entries.append({"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []})
        fields["logprobs"] = {"content": entries}
    if request.return_token_ids:
        fields["token_ids"] = answer.completion.token_ids
        fields["weight_versions"] = answer.completion.weight_versions
    return fields


async def create_response(model: ServedModel, body: dict[str, Any], request_id: str | None) -> dict[str, Any]:
    """Answer one Responses request."""
    request = parse_body(ResponsesRequest, body)
    _check_name(model, request.model)
    items = [{"role": "user", "content": request.input}] if isinstance(request.input, str) else request.input
    begun = None
    for position, item in enumerate(items):
        if item.get("generation_token_ids"):
            begun = Begun(_recorded_ids(item, f"input.{position}"), position + 1)
    system = [{"role": "system", "content": request.instructions}] if request.instructions else []
    chat = Chat.of([*system, *items], said_in_item, request.offered)
    if begun is None and (known := model.begun(chat)) is not None:
        begun = Begun(known.token_ids, known.count - len(system))
    asked: dict[str, Any] = {"input": items[begun.count :]} if begun is not None else {"input": items}
    if begun is None:
        asked["instructions"] = request.instructions
    try:
        messages = read_request({"responses_create_params": asked}, "input").messages
    except DataError as error:
        raise refused(error, "input") from error
    prompt_ids = model.prompt_ids(messages, request.offered, begun, "input")
    (answer,) = await model.answers(prompt_ids, request, max_tokens=request.max_output_tokens, label=request_id)
    output = _output(request, prompt_ids, answer)
    sampled_ids = answer.completion.token_ids
    model.conversations.remember(chat, [said_in_item(item) for item in output], prompt_ids, sampled_ids)
    truncated = answer.finish_reason == "length"
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": time.time(),
        "model": model.name,
        "status": "incomplete" if truncated else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if truncated else None,
        "error": None,
        "instructions": request.instructions,
        "metadata": request.metadata or {},
        "output": output,
        "parallel_tool_calls": request.parallel_tool_calls,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "max_output_tokens": request.max_output_tokens,
        "tool_choice": request.tool_choice,
        "tools": [tool.model_dump() for tool in request.tools],
        "usage": {
            "input_tokens": len(prompt_ids),
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": len(sampled_ids),
            "output_tokens_details": {"reasoning_tokens": model.chat.count_tokens(answer.turn.reasoning)},
            "total_tokens": len(prompt_ids) + len(sampled_ids),
        },
    }


def _output(request: ResponsesRequest, prompt_ids: Sequence[int], answer: Answer) -> list[dict[str, Any]]:
    items = answer.turn.output_items()
    if not request.parallel_tool_calls:
        first = next((i for i, item in enumerate(items) if item["type"] == "function_call"), len(items))
        items = items[: first + 1]
    prefixes = {"message": "msg", "function_call": "fc", "reasoning": "rs"}
    output = []
    for item in items:
        filled = {"id": f"{prefixes[item['type']]}_{uuid.uuid4().hex}", **item}
        if item["type"] != "reasoning":
            filled["status"] = "completed"
        output.append(filled)
    if request.return_token_ids:
        completion = answer.completion
        output[-1].update(
            prompt_token_ids=prompt_ids,
            generation_token_ids=completion.token_ids,
            generation_log_probs=completion.logprobs,
            generation_weight_versions=completion.weight_versions,
        )
    return output


_ASKED = {
    "/v1/chat/completions": chat_completion,
    "/v1/responses": create_response,
    "/tokenize": tokenize,
    "/v1/tokenize": tokenize,
}


class Endpoint:
    """A generator on a loopback port, from `with` to its end."""

    def __init__(
        self,
        sampler: AsyncSampler,
        chat: ChatFormat,
        *,
        name: str,
        max_total_length: int,
        defaults: SamplingParams,
        turn_format: TurnFormat = DEFAULT_FORMAT,
        own_loop: bool = False,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self._sampler = sampler
        self._own_loop = own_loop
        self._model = ServedModel(
            sampler, chat, name=name, max_total_length=max_total_length, turn_format=turn_format, defaults=defaults
        )
        self._http = HttpServer(self._answer, host=host, port=port)

    @property
    def url(self) -> str:
        """Base URL as OpenAI clients want it, up to and including /v1."""
        return f"{self._http.url}/v1"

    @property
    def model_name(self) -> str:
        """What requests call the model."""
        return self._model.name

    def __enter__(self) -> Endpoint:
        self._thread = LoopThread("endpoint")
        self._thread.run(self._start())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.run(self._http.stop())
        self._thread.stop()

    async def _start(self) -> None:
        if self._own_loop:
            self._sampler.bind()
        await self._http.start()

    async def _answer(self, request: Request) -> Reply:
        try:
            return Reply(200, await self._route(request))
        except ApiError as error:
            return error.reply()
        except Exception as error:  # one request must not take the others down; the client and the log learn of it
            _LOG.exception("request %s %s failed", request.method, request.path)
            return ApiError(500, f"{type(error).__name__}: {error}", code="internal_error").reply()

    async def _route(self, request: Request) -> dict[str, Any]:
        model, path = self._model, request.path.rstrip("/")
        if path not in _ASKED and path not in ("/health", "/v1/models"):
            raise ApiError(404, f"no such path: {request.path}", code="not_found")
        if request.method != ("POST" if path in _ASKED else "GET"):
            raise ApiError(405, f"{request.method} is not allowed for {path}", code="method_not_allowed")
        if not model.ready and not path.endswith("/tokenize"):
            raise not_ready()
        if path == "/health":
            return {"status": "ok", "weight_version": self._sampler.generator.weight_version}
        if path == "/v1/models":
            card = {"id": model.name, "object": "model", "created": 0, "owned_by": "nemotron_steps"}
            return {"object": "list", "data": [{**card, "max_model_len": model.max_total_length}]}
        try:
            body = json.loads(request.body)
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from error
        if not isinstance(body, dict):
            raise ApiError(400, "the body must be a JSON object", code="invalid_json")
        return await _ASKED[path](model, body, request.headers.get("x-request-id"))
