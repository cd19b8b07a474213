"""Conversations that an endpoint has sampled, found again by what a later request says of them.

Agents send messages, and a chat template may show earlier turns otherwise than they were sampled (without their
reasoning, say). So the endpoint keeps the tokens of what it answered: a request whose messages begin with a known
conversation goes on from that one's tokens. Messages are compared by what an agent hands on: roles, texts without
reasoning, names and arguments of calls. Where several conversations say the same, ids of calls and items, and reasoning
that was sent along, tell them apart; then the newest is taken.

Not for: requests that carry token ids themselves (served_model.py).
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemotron_steps.environments.responses import content_text, split_reasoning

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
