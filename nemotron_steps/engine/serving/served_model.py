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
from collections.abc import Callable, Iterator, Mapping, Sequence
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

_POLL_SECONDS = 0.5
MAX_TOKENS = 2**25
"""Tokens kept of conversations, 4 bytes each; what was not asked about for longest is forgotten first."""


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
class Chat:
    """What a request says, and with which tools; `said` is None where a message is malformed."""

    said: tuple[Said, ...] | None
    tools: Sequence[dict[str, Any]]

    @classmethod
    def of(cls, messages: Sequence[Any], read: Callable[[Any], Said], tools: Sequence[dict[str, Any]]) -> Chat:
        """Messages or items."""
        try:
            return cls(tuple(read(message) for message in messages), tools)
        except (TypeError, AttributeError, KeyError):  # rendering them will say how
            return cls(None, tools)

    def keys(self) -> list[bytes]:
        """A digest of nothing and of each beginning of the chat."""
        key = hashlib.sha256(json.dumps(list(self.tools), sort_keys=True).encode()).digest()
        keys = [key]
        for one in self.said or ():
            for part in one.parts:
                key = hashlib.sha256(key + json.dumps(part).encode()).digest()
            keys.append(key)
        return keys


@dataclass(eq=False)
class _KnownTurn:
    """An assistant turn that was sampled here, after the turns before it."""

    key: bytes
    before: _KnownTurn | None
    added: array[int]
    """Tokens after those of `before`: what was said meanwhile, and the turn."""
    marks: frozenset[str]

    def path(self) -> Iterator[_KnownTurn]:
        turn: _KnownTurn | None = self
        while turn is not None:
            yield turn
            turn = turn.before

    def token_ids(self) -> list[int]:
        return [token for turn in reversed([*self.path()]) for token in turn.added]


@dataclass(frozen=True)
class Begun:
    """The beginning of a chat whose exact tokens are known."""

    token_ids: Sequence[int]
    """Up to the end of an assistant turn."""
    count: int
    """Messages (or items) of the chat up to there."""


class KnownConversations:
    """See the module docstring."""

    def __init__(self) -> None:
        self._tokens = 0
        self._turns: dict[bytes, list[_KnownTurn]] = {}
        self._by_use: OrderedDict[int, _KnownTurn] = OrderedDict()

    def find(self, chat: Chat) -> tuple[_KnownTurn, int] | None:
        """The known turn after which a chat goes on, and how much of it is said up to there; or None."""
        said, keys = chat.said or (), chat.keys()
        marks = frozenset(mark for one in said for mark in one.marks)
        for count in range(len(said) - 1, 0, -1):
            turns = self._turns.get(keys[count], ()) if said[count - 1].by_assistant else ()
            if not turns:
                continue
            best = max(turns, key=lambda turn: sum(len(one.marks & marks) for one in turn.path()))
            for turn in reversed([*best.path()]):
                if id(turn) in self._by_use:
                    self._by_use.move_to_end(id(turn))
            return best, count
        return None

    def remember(self, chat: Chat, answer: Sequence[Said], prompt_ids: list[int], sampled_ids: Sequence[int]) -> None:
        """Keep the tokens of a turn that was just sampled."""
        if chat.said is None:
            return
        found = self.find(chat)
        known = [] if found is None else found[0].token_ids()
        before = found[0] if found is not None and known == prompt_ids[: len(known)] else None
        added = array("i", [*prompt_ids[len(known) if before is not None else 0 :], *sampled_ids])
        marks = frozenset(mark for one in answer for mark in one.marks)
        turn = _KnownTurn(replace(chat, said=(*chat.said, *answer)).keys()[-1], before, added, marks)
        self._turns.setdefault(turn.key, []).insert(0, turn)
        self._by_use[id(turn)] = turn
        self._tokens += len(added)
        while self._tokens > MAX_TOKENS:
            _, oldest = self._by_use.popitem(last=False)
            self._tokens -= len(oldest.added)
            self._turns[oldest.key].remove(oldest)
            if not self._turns[oldest.key]:
                del self._turns[oldest.key]


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
    stream: Literal[False] = False
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
    """A generator with its tokenizer under one name, asked from any event loop: the HTTP server has its own, so that it
    answers while the policy trains."""

    def __init__(
        self,
        sampler: AsyncSampler,
        chat: ChatFormat,
        *,
        name: str,
        max_total_length: int,
        turn_format: TurnFormat,
        defaults: SamplingParams,
    ) -> None:
        self.sampler = sampler
        self.chat = chat
        self.name = name
        self.max_total_length = max_total_length
        self.conversations = KnownConversations()
        self._turn_format = turn_format
        self._defaults = defaults
        self._vocabulary = len(chat.tokenizer)
        self._ids = itertools.count()
        self._ends = frozenset((*chat.end_ids, *defaults.stop_token_ids))

    @property
    def ready(self) -> bool:
        """Whether there is a loop that steps the generator."""
        return self.sampler.loop is not None and not self.sampler.loop.is_closed()

    def begun(self, chat: Chat) -> Begun | None:
        """The longest beginning of a chat that was sampled here."""
        found = self.conversations.find(chat)
        return None if found is None else Begun(found[0].token_ids(), found[1])

    def prompt_ids(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], begun: Begun | None, param: str
    ) -> list[int]:
        """Token ids to sample from."""
        if not messages:
            raise ApiError(400, "no message to answer", param=param)
        try:
            if begun is None:
                ids = self.chat.render(messages, tools)
            else:
                known = begun.token_ids
                if min(known) < 0 or max(known) >= self._vocabulary:
                    raise ApiError(400, "the recorded token ids are not this model's", param=param)
                ended = known[-1] in self._ends
                ids = [*known, *self.chat.render_continuation(messages, tools, turn_ended=ended)]
        except (ArtifactError, DataError) as error:
            raise ApiError(400, error.what, param=param) from error
        except (TypeError, ValueError, KeyError, TemplateError) as error:
            raise ApiError(400, f"the chat template refuses this: {error}", param=param) from error
        if len(ids) >= self.max_total_length:
            what = f"the prompt has {len(ids)} tokens and the model's context is {self.max_total_length}"
            raise ApiError(400, what, param=param, code="context_length_exceeded")
        return ids

    async def answers(
        self,
        prompt_ids: list[int],
        request: SharedFields,
        *,
        max_tokens: int | None,
        label: str | None,
        n: int = 1,
        stop: Sequence[str] = (),
    ) -> list[Answer]:
        """n samples. `label` names the random stream of a seeded request besides its seed."""
        defaults = self._defaults
        given = {name: getattr(request, name) for name in ("temperature", "top_p", "top_k")}
        asked: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        most = defaults.max_new_tokens if max_tokens is None else max_tokens
        params = replace(
            defaults,
            max_new_tokens=min(most, self.max_total_length - len(prompt_ids)),
            stop_strings=(*defaults.stop_strings, *stop),
            seed=request.seed,
            **asked,
        )
        if request.seed is None:
            request_id = f"http/{next(self._ids)}"
        elif label is not None:
            request_id = label
        else:
            digest = hashlib.sha256(" ".join(map(str, prompt_ids)).encode()).hexdigest()[:24]
            request_id = f"http/seeded/{request.seed}/{digest}"
        answers = []
        for completion in await self._sampled(prompt_ids, params, n, request_id):
            text = self.chat.decode(completion.token_ids)
            ends = [end for end in (text.find(each) for each in params.stop_strings) if end >= 0]
            text = text[: min(ends, default=None)]
            turn_format = self._turn_format if request.offered else replace(self._turn_format, tool_parser="none")
            prefix = f"call_{hashlib.sha256(f'{request_id}/{completion.index}'.encode()).hexdigest()[:16]}"
            answers.append(Answer(completion, parse_assistant(text, prefix, turn_format, request.offered)))
        return answers

    async def _sampled(
        self, prompt_ids: Sequence[int], params: SamplingParams, n: int, request_id: str
    ) -> list[Completion]:
        there = self.sampler.loop
        if there is None or there.is_closed():
            raise not_ready()
        asked = asyncio.run_coroutine_threadsafe(self._sample(prompt_ids, params, n, request_id), there)
        try:
            result = asyncio.wrap_future(asked)
            while not (await asyncio.wait({result}, timeout=_POLL_SECONDS))[0]:
                if there.is_closed():
                    raise not_ready()
            if result.cancelled():
                raise ApiError(503, "the request was dropped by the run", code="dropped")
            return result.result()
        except (ApiError, asyncio.CancelledError):
            raise
        except Exception as error:
            raise ApiError(500, f"generation broke: {error}") from error
        finally:
            if not there.is_closed():
                asked.cancel()

    async def _sample(
        self, prompt_ids: Sequence[int], params: SamplingParams, n: int, request_id: str
    ) -> list[Completion]:
        """On the sampler's loop; cancelled, it drops the request."""
        while self.sampler.is_sampling(request_id):  # the same seeded request twice at a time: the second waits
            await asyncio.sleep(0.01)
        try:
            futures = self.sampler.submit(prompt_ids, params, n, request_id)
        except EngineError as error:
            raise ApiError(400, error.what, code="refused_by_generator") from error
        try:
            return await asyncio.gather(*futures)
        finally:
            self.sampler.cancel_request(request_id)


Model = TypeVar("Model", bound=BaseModel)


class ApiError(Exception):
    """A request that cannot be answered."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.status = status
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def reply(self) -> Reply:
        """As an HTTP answer; Retry-After where the client should come again."""
        return Reply(self.status, self.body, (("Retry-After", "1"),) if self.status == 503 else ())


def not_ready() -> ApiError:
    """The answer while nothing can be sampled."""
    return ApiError(503, "the generator is not ready", code="not_ready")


def refused(error: DataError, param: str) -> ApiError:
    """The answer to messages that cannot be read: 400, with the field."""
    field = (error.where or "").partition(" field ")[2].removeprefix("responses_create_params.") or param
    what = error.what.replace("responses_create_params.", "")
    what = what if error.found is None else f"{what}, found {error.found}"
    return ApiError(400, what, param=field.replace("[", ".").replace("]", ""))


def parse_body(schema: type[Model], body: Mapping[str, Any]) -> Model:
    """A request body as its model. A field that is null counts as absent, as in OpenAI's API."""
    try:
        return schema.model_validate({name: value for name, value in body.items() if value is not None})
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        param = ".".join(str(part) for part in first["loc"]) or None
        if first["type"] == "extra_forbidden" and param is not None:
            close = nearest(param, schema.model_fields)
            what = f"this endpoint does not support `{param}`"
            what += f"; did you mean {' or '.join(close)}?" if close else ""
            raise ApiError(400, what, param=param, code="unsupported_parameter") from error
        message = first["msg"].removeprefix("Value error, ")
        raise ApiError(400, f"{param}: {message}" if param else message, param=param) from error
