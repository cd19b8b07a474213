"""What both APIs share: chat to prompt ids, sampling, and a completion taken apart into a turn.

A follow-up request continues the exact ids of the earlier turns, whether its messages carry them or only say what was
said (known_conversations.py): text that is tokenised again may come out as other tokens, and a trained token must be
the one that was sampled.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from jinja2 import TemplateError

from nemotron_steps.engine.rollouts.conversation import AssistantTurn, TurnFormat, parse_assistant
from nemotron_steps.engine.serving.api_errors import ApiError
from nemotron_steps.engine.serving.known_conversations import KnownConversations, Said
from nemotron_steps.engine.serving.sampling import SamplerBridge
from nemotron_steps.engine.types import Completion, FinishReason, SamplingParams
from nemotron_steps.errors import ArtifactError, DataError
from nemotron_steps.models.chat import ChatFormat


@dataclass(frozen=True)
class Begun:
    """The beginning of a chat whose exact tokens are known."""

    token_ids: Sequence[int]
    """Up to the end of an assistant turn."""
    count: int
    """Messages (or items) of the chat up to there."""


@dataclass(frozen=True)
class Prompt:
    """What is sampled from.

    Attributes:
        said, tools: what conversations are known by; None where that cannot be compared.
    """

    token_ids: list[int]
    said: tuple[Said, ...] | None
    tools: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Sampling:
    """The sampling fields of a request; None takes the model's default.

    `label` names the random stream of a seeded request besides its seed; requests that are equal in both, and in their
    prompt's tokens, get equal samples.
    """

    n: int = 1
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    label: str | None = None


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
    """A generator with its tokenizer under one name.

    Args:
        bridge: reaches the generator.
        chat: its tokenizer and template.
        name: model name that requests use.
        max_total_length: most tokens of prompt and answer together.
        turn_format: how the model writes reasoning and tool calls.
        defaults: what a request that says nothing gets; its stop tokens always apply, and so does its
            max_new_tokens where a request names none.
    """

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
        """Keep an answer's tokens for the request that goes on after it.

        Args:
            returned: the answer as the client got it.
        """
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
        """Token ids to sample from.

        Args:
            messages: the whole chat; or, with `begun`, only what came after that.
            param: field to name when the chat cannot be used.

        Raises:
            ApiError: 400.
        """
        if not messages:
            raise ApiError(400, "no message to answer", param=param, code="invalid_value")
        try:
            if begun is None:
                ids = self.chat.render(messages, tools)
            else:
                ids = self._continue(begun.token_ids, messages, tools, param)
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

    def _continue(
        self, ids: Sequence[int], messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], param: str
    ) -> list[int]:
        if min(ids) < 0 or max(ids) >= self._vocabulary:
            raise ApiError(400, "the recorded token ids are not this model's", param=param, code="invalid_value")
        return [*ids, *self.chat.render_continuation(messages, tools, turn_ended=ids[-1] in self._ends)]

    async def answers(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> AsyncGenerator[Answer, None]:
        """Samples as they finish.

        Args:
            tools: offered ones; None leaves tool calls unread.

        Raises:
            ApiError: from the generator (sampling.py).
        """
        defaults = self._defaults
        room = self.max_total_length - len(prompt_ids)
        params = replace(
            defaults,
            max_new_tokens=min(defaults.max_new_tokens if sampling.max_tokens is None else sampling.max_tokens, room),
            temperature=defaults.temperature if sampling.temperature is None else sampling.temperature,
            top_p=defaults.top_p if sampling.top_p is None else sampling.top_p,
            top_k=defaults.top_k if sampling.top_k is None else sampling.top_k,
            stop_strings=(*defaults.stop_strings, *sampling.stop),
            seed=sampling.seed,
        )
        request_id = self._request_id(prompt_ids, sampling)
        async with aclosing(self.bridge.samples(prompt_ids, params, sampling.n, request_id)) as completions:
            async for completion in completions:
                yield Answer(completion, self._read(completion, params.stop_strings, tools, request_id))

    def _request_id(self, prompt_ids: Sequence[int], sampling: Sampling) -> str:
        if sampling.seed is None:
            return f"http/{next(self._ids)}"
        if sampling.label is not None:
            return sampling.label
        digest = hashlib.sha256(" ".join(map(str, prompt_ids)).encode()).hexdigest()[:24]
        return f"http/seeded/{sampling.seed}/{digest}"

    def _read(
        self,
        completion: Completion,
        stop_strings: Sequence[str],
        tools: Sequence[Mapping[str, Any]] | None,
        request_id: str,
    ) -> AssistantTurn:
        text = self.chat.decode(completion.token_ids)
        ends = [end for end in (text.find(stop) for stop in stop_strings) if end >= 0]
        if ends:
            text = text[: min(ends)]
        turn_format = self._turn_format if tools else replace(self._turn_format, tool_parser="none")
        prefix = f"call_{hashlib.sha256(f'{request_id}/{completion.index}'.encode()).hexdigest()[:16]}"
        return parse_assistant(text, prefix, turn_format, tools or ())

    def logprob_entries(self, completion: Completion, *, as_ids: bool) -> list[dict[str, Any]]:
        """The sampled tokens as OpenAI's logprobs list.

        Args:
            as_ids: write tokens as "token_id:N" (vLLM's return_tokens_as_token_ids).
        """
        entries = []
        for token_id, logprob in zip(completion.token_ids, completion.logprobs, strict=True):
            token = f"token_id:{token_id}" if as_ids else self.chat.decode_token(token_id)
            entries.append({"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []})
        return entries
