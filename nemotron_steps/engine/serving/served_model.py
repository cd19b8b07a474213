"""What both APIs share: chat to prompt ids, sampling, and a completion taken apart into a turn.

A follow-up request continues the exact ids of the earlier turns, whether its messages carry them or only say what was
said: text that is tokenised again may come out as other tokens, and a chat template may show earlier turns otherwise
than they were sampled. So the tokens of every answer are kept. Messages are compared by what an agent hands on: roles,
texts without reasoning, names and arguments of calls. Where several conversations say the same, ids of calls and items,
and reasoning that was sent along, tell them apart; then the newest is taken.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
from array import array
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from jinja2 import TemplateError
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nemotron_steps.config.names import nearest
from nemotron_steps.engine.generation.sampler import AsyncSampler
from nemotron_steps.engine.rollouts.conversation import AssistantTurn, TurnFormat, parse_assistant
from nemotron_steps.engine.types import Completion, FinishReason, SamplingParams
from nemotron_steps.environments.http_server import Reply
from nemotron_steps.environments.responses import content_text, split_reasoning
from nemotron_steps.errors import ArtifactError, DataError, EngineError
from nemotron_steps.models.chat import ChatFormat

MAX_TOKENS = 2**25
"""Tokens kept, 4 bytes each; what was not asked about for longest is forgotten first."""


@dataclass(frozen=True)
class Said:
    """One message or item as conversations are compared."""

    parts: tuple[tuple[str, ...], ...]
    marks: frozenset[str] = frozenset()
    by_assistant: bool = False


def said_in_chat(message: Mapping[str, Any]) -> Said:
    """A message of the chat API. Whatever is malformed in it is compared as it is."""
    role, text = _role(message), content_text(message.get("content"))
    if role != "assistant":
        return Said(((role, text.strip()),))
    reasoning, text = split_reasoning(text)
    marks = {f"reasoning {message.get('reasoning_content') or reasoning}"}
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        calls.append(_call(function.get("name"), function.get("arguments")))
        marks.add(f"call {call.get('id')}")
    parts = ((("assistant", text.strip()),) if text.strip() or not calls else ()) + tuple(calls)
    return Said(parts, frozenset(marks), by_assistant=True)


def said_in_item(item: Mapping[str, Any]) -> Said:
    """An item of the Responses API."""
    kind = item.get("type", "message")
    marks = frozenset({f"item {item['id']}"} if item.get("id") else ())
    if kind == "reasoning":
        return Said((), marks | {f"reasoning {content_text(item.get('summary'))}"})
    if kind == "function_call":
        called = _call(item.get("name"), item.get("arguments"))
        return Said((called,), marks | {f"call {item.get('call_id')}"}, by_assistant=True)
    if kind == "function_call_output":
        return Said((("tool", content_text(item.get("output")).strip()),))
    role, text = _role(item), content_text(item.get("content"))
    if role == "assistant":
        return Said((("assistant", split_reasoning(text)[1].strip()),), marks, by_assistant=True)
    return Said(((role, text.strip()),))


def all_said(messages: Sequence[Any], read: Callable[[Any], Said]) -> tuple[Said, ...] | None:
    """Every message or item; None if one of them is malformed: rendering them will say how."""
    try:
        return tuple(read(message) for message in messages)
    except (TypeError, AttributeError, KeyError):
        return None


@dataclass(eq=False)
class KnownTurn:
    """An assistant turn, after the turns before it."""

    key: bytes
    before: KnownTurn | None
    added: array[int]
    """Tokens after those of `before`: what was said meanwhile, and the turn."""
    marks: frozenset[str]

    def path(self) -> Iterator[KnownTurn]:
        """This turn, the one before it, and so on."""
        turn: KnownTurn | None = self
        while turn is not None:
            yield turn
            turn = turn.before

    def token_ids(self) -> list[int]:
        """All tokens of the conversation up to the end of this turn."""
        return [token for turn in reversed([*self.path()]) for token in turn.added]


class KnownConversations:
    """See the module docstring."""

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._tokens = 0
        self._turns: dict[bytes, list[KnownTurn]] = {}
        self._by_use: OrderedDict[int, KnownTurn] = OrderedDict()

    def find(self, said: Sequence[Said], tools: Sequence[Mapping[str, Any]]) -> tuple[KnownTurn, int] | None:
        """The known turn after which a chat goes on, and how much of `said` is up to there; or None."""
        keys = _keys(said, tools)
        marks = frozenset(mark for one in said for mark in one.marks)
        for count in range(len(said) - 1, 0, -1):
            turns = self._turns.get(keys[count], ()) if said[count - 1].by_assistant else ()
            if turns:
                best = max(turns, key=lambda turn: sum(len(one.marks & marks) for one in turn.path()))
                for turn in reversed([*best.path()]):
                    if id(turn) in self._by_use:
                        self._by_use.move_to_end(id(turn))
                return best, count
        return None

    def remember(
        self,
        said: Sequence[Said],
        answer: Sequence[Said],
        tools: Sequence[Mapping[str, Any]],
        prompt_ids: Sequence[int],
        sampled_ids: Sequence[int],
    ) -> None:
        """Keep the tokens of a turn that was just sampled."""
        found = self.find(said, tools)
        before, start = None, 0
        if found is not None:
            known = found[0].token_ids()
            if known == list(prompt_ids[: len(known)]):
                before, start = found[0], len(known)
        added = array("i", [*prompt_ids[start:], *sampled_ids])
        marks = frozenset(mark for one in answer for mark in one.marks)
        turn = KnownTurn(_keys([*said, *answer], tools)[-1], before, added, marks)
        self._turns.setdefault(turn.key, []).insert(0, turn)
        self._by_use[id(turn)] = turn
        self._tokens += len(added)
        while self._tokens > self._max_tokens:
            _, oldest = self._by_use.popitem(last=False)
            self._tokens -= len(oldest.added)
            same = self._turns[oldest.key]
            same.remove(oldest)
            if not same:
                del self._turns[oldest.key]


def _keys(said: Sequence[Said], tools: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """A digest of nothing and of each beginning of a chat, with the tools that were offered."""
    key = hashlib.sha256(json.dumps(list(tools), sort_keys=True).encode()).digest()
    keys = [key]
    for one in said:
        for part in one.parts:
            key = hashlib.sha256(key + json.dumps(part).encode()).digest()
        keys.append(key)
    return keys


def _role(message: Mapping[str, Any]) -> str:
    role = message.get("role")
    return "system" if role == "developer" else str(role)


def _call(name: Any, arguments: Any) -> tuple[str, ...]:
    try:
        value = json.loads(arguments or "{}") if isinstance(arguments, str | None) else arguments
    except (ValueError, RecursionError):
        value = arguments
    return ("call", str(name), json.dumps(value, sort_keys=True))


@dataclass(frozen=True)
class Begun:
    """The beginning of a chat whose exact tokens are known."""

    token_ids: Sequence[int]
    """Up to the end of an assistant turn."""
    count: int
    """Messages (or items) of the chat up to there."""


@dataclass(frozen=True)
class Prompt:
    """What is sampled from."""

    token_ids: list[int]
    said: tuple[Said, ...] | None
    tools: Sequence[Mapping[str, Any]]


class ApiModel(BaseModel):
    """A part of a request. Unknown fields are refused: one that is ignored would change what was asked for."""

    model_config = ConfigDict(extra="forbid")


class SharedFields(ApiModel):
    """What both APIs have."""

    model: str | None = None
    temperature: float | None = Field(None, ge=0, le=10)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    tool_choice: Literal["auto", "none"] = "auto"
    parallel_tool_calls: bool = True
    """False: calls after the first are left out of the answer."""
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    top_logprobs: Literal[0] = 0
    tools: list[Any] = Field(default_factory=list)

    @property
    def offered(self) -> list[dict[str, Any]]:
        """The tools shown to the model."""
        shown = self.tools if self.tool_choice == "auto" else []
        return [tool.model_dump(exclude_none=True) for tool in shown]


@dataclass(frozen=True)
class Answer:
    """One sample of a request."""

    completion: Completion
    turn: AssistantTurn

    @property
    def finish_reason(self) -> str:
        """OpenAI's: length, tool_calls or stop."""
        if self.completion.finish_reason is not FinishReason.STOP:
            return "length"
        return "tool_calls" if self.turn.tool_calls else "stop"


class ServedModel:
    """A generator with its tokenizer under one name."""

    def __init__(
        self,
        bridge: SamplerBridge,
        chat: ChatFormat,
        *,
        name: str,
        max_total_length: int,
        turn_format: TurnFormat,
        defaults: SamplingParams,
    ) -> None:
        self.bridge = bridge
        self.chat = chat
        self.name = name
        self.max_total_length = max_total_length
        self._turn_format = turn_format
        self._defaults = defaults
        self._vocabulary = len(chat.tokenizer)
        self._ids = itertools.count()
        self._conversations = KnownConversations()
        self._ends = frozenset((*chat.end_ids, *defaults.stop_token_ids))

    def check_name(self, asked: str | None) -> None:
        """Refuse a request for another model (404)."""
        if asked is not None and asked != self.name:
            raise ApiError(
                404, f"no model is named {asked!r}; this is {self.name!r}", param="model", code="model_not_found"
            )

    def begun(self, said: tuple[Said, ...] | None, tools: Sequence[Mapping[str, Any]]) -> Begun | None:
        """The longest beginning of a chat that was sampled here."""
        found = None if said is None else self._conversations.find(said, tools)
        return None if found is None else Begun(found[0].token_ids(), found[1])

    def remember(self, prompt: Prompt, answer: Answer, returned: Sequence[Said]) -> None:
        """Keep an answer's tokens for the request that goes on after it."""
        if prompt.said is not None:
            ids = answer.completion.token_ids
            self._conversations.remember(prompt.said, returned, prompt.tools, prompt.token_ids, ids)

    def prompt_ids(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]],
        begun: Begun | None,
        param: str,
    ) -> list[int]:
        """Token ids to sample from."""
        if not messages:
            raise ApiError(400, "no message to answer", param=param, code="invalid_value")
        try:
            if begun is None:
                ids = self.chat.render(messages, tools)
            else:
                known = begun.token_ids
                if min(known) < 0 or max(known) >= self._vocabulary:
                    what = "the recorded token ids are not this model's"
                    raise ApiError(400, what, param=param, code="invalid_value")
                ended = known[-1] in self._ends
                ids = [*known, *self.chat.render_continuation(messages, tools, turn_ended=ended)]
        except (ArtifactError, DataError) as error:
            raise ApiError(400, error.what, param=param, code="invalid_value") from error
        except (TypeError, ValueError, KeyError, TemplateError) as error:
            what = f"the chat template refuses this: {error}"
            raise ApiError(400, what, param=param, code="invalid_value") from error
        if len(ids) >= self.max_total_length:
            raise ApiError(
                400,
                f"the prompt has {len(ids)} tokens and the model's context is {self.max_total_length}",
                param=param,
                code="context_length_exceeded",
            )
        return ids

    async def answers(
        self,
        prompt: Prompt,
        request: SharedFields,
        *,
        max_tokens: int | None,
        label: str | None,
        n: int = 1,
        stop: Sequence[str] = (),
    ) -> AsyncGenerator[Answer, None]:
        """Samples as they finish. `label` names the random stream of a seeded request besides its seed."""
        defaults = self._defaults
        given = {name: getattr(request, name) for name in ("temperature", "top_p", "top_k")}
        asked: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        most = defaults.max_new_tokens if max_tokens is None else max_tokens
        params = replace(
            defaults,
            max_new_tokens=min(most, self.max_total_length - len(prompt.token_ids)),
            stop_strings=(*defaults.stop_strings, *stop),
            seed=request.seed,
            **asked,
        )
        if request.seed is None:
            request_id = f"http/{next(self._ids)}"
        elif label is not None:
            request_id = label
        else:
            digest = hashlib.sha256(" ".join(map(str, prompt.token_ids)).encode()).hexdigest()[:24]
            request_id = f"http/seeded/{request.seed}/{digest}"
        async with aclosing(self.bridge.samples(prompt.token_ids, params, n, request_id)) as completions:
            async for completion in completions:
                yield Answer(completion, self._read(completion, params.stop_strings, prompt.tools, request_id))

    def _read(
        self, completion: Completion, stop_strings: Sequence[str], tools: Sequence[Mapping[str, Any]], request_id: str
    ) -> AssistantTurn:
        text = self.chat.decode(completion.token_ids)
        ends = [end for end in (text.find(stop) for stop in stop_strings) if end >= 0]
        if ends:
            text = text[: min(ends)]
        turn_format = self._turn_format if tools else replace(self._turn_format, tool_parser="none")
        prefix = f"call_{hashlib.sha256(f'{request_id}/{completion.index}'.encode()).hexdigest()[:16]}"
        return parse_assistant(text, prefix, turn_format, tools)


Model = TypeVar("Model", bound=BaseModel)


class ApiError(Exception):
    """A request that cannot be answered."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = {
            "error": {
                "message": message,
                "type": "invalid_request_error" if status < 500 else "server_error",
                "param": param,
                "code": code,
            }
        }

    def reply(self) -> Reply:
        """As an HTTP answer; Retry-After where the client should come again."""
        return Reply(self.status, self.body, (("Retry-After", "1"),) if self.status == 503 else ())


def refused(error: DataError, param: str) -> ApiError:
    """The answer to messages that cannot be read: 400, with the field."""
    field = (error.where or "").partition(" field ")[2].removeprefix("responses_create_params.") or param
    what = error.what.replace("responses_create_params.", "")
    what = what if error.found is None else f"{what}, found {error.found}"
    return ApiError(400, what, param=field.replace("[", ".").replace("]", ""), code="invalid_value")


def parse_body(schema: type[Model], body: Mapping[str, Any]) -> Model:
    """A request body as its model. A field that is null counts as absent, as in OpenAI's API."""
    try:
        return schema.model_validate({name: value for name, value in body.items() if value is not None})
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        param = ".".join(str(part) for part in first["loc"]) or None
        if first["type"] == "extra_forbidden" and param is not None:
            close = nearest(param, schema.model_fields)
            guess = f"; did you mean {' or '.join(close)}?" if close else ""
            raise ApiError(
                400, f"this endpoint does not support `{param}`{guess}", param=param, code="unsupported_parameter"
            ) from error
        message = first["msg"].removeprefix("Value error, ")
        raise ApiError(400, f"{param}: {message}" if param else message, param=param, code="invalid_value") from error


_POLL_SECONDS = 0.5


class SamplerBridge:
    """Asks a sampler from any event loop: the HTTP server has its own, so that it answers while the policy trains."""

    def __init__(self, sampler: AsyncSampler) -> None:
        self._sampler = sampler
        self._running: dict[str, asyncio.Event] = {}

    @property
    def ready(self) -> bool:
        """Whether there is a loop that steps the generator."""
        return self._sampler.loop is not None and not self._sampler.loop.is_closed()

    @property
    def weight_version(self) -> int:
        """Version of the weights that the next token is sampled with."""
        return self._sampler.generator.weight_version

    async def samples(
        self, prompt_ids: Sequence[int], params: SamplingParams, n: int, request_id: str
    ) -> AsyncGenerator[Completion, None]:
        """n samples as they finish. Leaving the generator early drops what is unfinished."""
        # The same seeded request twice at a time: the second waits, since the generator tells requests apart by id.
        while request_id in self._running:
            await self._running[request_id].wait()
        self._running[request_id] = asyncio.Event()
        try:
            async with aclosing(self._sample(prompt_ids, params, n, request_id)) as completions:
                async for completion in completions:
                    yield completion
        finally:
            self._running.pop(request_id).set()

    async def _sample(
        self, prompt_ids: Sequence[int], params: SamplingParams, n: int, request_id: str
    ) -> AsyncGenerator[Completion, None]:
        here, there = asyncio.get_running_loop(), self._sampler.loop
        if there is None or there.is_closed():
            raise ApiError(503, "the generator is not ready", code="not_ready")
        results: asyncio.Queue[Completion | BaseException] = asyncio.Queue()

        def tell(result: Completion | BaseException) -> None:
            if not here.is_closed():
                here.call_soon_threadsafe(results.put_nowait, result)

        def finished(future: asyncio.Future[Completion]) -> None:
            if future.cancelled():
                tell(ApiError(503, "the request was dropped by the run", code="dropped"))
            else:
                tell(future.exception() or future.result())

        def submit() -> None:  # on the sampler's loop
            try:
                futures = self._sampler.submit(prompt_ids, params, n, request_id)
            except (EngineError, ValueError) as error:
                message = error.what if isinstance(error, EngineError) else str(error)
                tell(ApiError(400, message, code="refused_by_generator"))
                return
            except Exception as error:  # nobody awaits this callback: whoever asked learns of it
                tell(error)
                return
            for future in futures:
                future.add_done_callback(finished)

        there.call_soon_threadsafe(submit)
        done = 0
        try:
            while done < n:
                try:
                    async with asyncio.timeout(_POLL_SECONDS):  # wait_for may swallow a cancellation (Python 3.11)
                        result = await results.get()
                except TimeoutError:
                    if there.is_closed():
                        raise ApiError(503, "the run ended", code="not_ready") from None
                    continue
                if isinstance(result, ApiError):
                    raise result
                if isinstance(result, BaseException):
                    raise ApiError(500, f"generation broke: {result}") from result
                done += 1
                yield result
        finally:
            if done < n and not there.is_closed():
                there.call_soon_threadsafe(self._sampler.cancel_request, request_id)
