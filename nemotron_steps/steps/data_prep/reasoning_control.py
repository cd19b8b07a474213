"""Reasoning control: chats without reasoning, with reasoning that was cut to a budget, and with little asked for.

Reasoning is what stands in think tags at the beginning of an assistant's content, or in its `reasoning_content`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import msgspec

from nemotron_steps.config.schema.data_prep import ReasoningControlConfig
from nemotron_steps.environments.responses import THINK_CLOSE, THINK_OPEN, content_text, split_reasoning
from nemotron_steps.rows.lines import Row

_FIELD = "reasoning_content"


class ReasoningControl:
    """Strips or cuts the reasoning of a share of chats."""

    def __init__(self, config: ReasoningControlConfig) -> None:
        self._config = config
        self._cut = _tokenizer_cut(config.tokenizer) if config.tokenizer is not None else _cut_words

    def __call__(self, row: Row) -> Row | None:
        """The changed row, or None where it stays as it is: most do, and those without reasoning."""
        config = self._config
        digest = blake2b(msgspec.json.encode(row["messages"]), key=str(config.seed).encode(), digest_size=8).hexdigest()
        rng = random.Random(digest)
        draw = rng.random()
        if draw < config.strip_share:
            return _stripped(row)
        if draw < config.strip_share + config.truncate_share:
            return self._truncated(row, rng.choice(config.budgets))
        return None

    def _truncated(self, row: Row, budget: int) -> Row | None:
        messages = [dict(message) for message in row["messages"]]
        last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
        reasoning, answer = reasoning_of(messages[last])
        cut = self._cut(reasoning, budget)
        if cut == reasoning:
            return None
        own = {_FIELD: cut} if messages[last].get(_FIELD) else {"content": f"{THINK_OPEN}{cut}{THINK_CLOSE}{answer}"}
        messages[last] = {**messages[last], **own}
        return {**row, "messages": messages, "reasoning_budget": budget}


def reasoning_of(message: Row) -> tuple[str, str]:
    """(reasoning, answer) of an assistant message."""
    text = content_text(message.get("content"))
    if message.get(_FIELD):
        return str(message[_FIELD]), text
    return split_reasoning(text) if THINK_CLOSE in text else ("", text)


def _stripped(row: Row) -> Row | None:
    messages = []
    changed = False
    for message in row["messages"]:
        reasoning, answer = reasoning_of(message) if message["role"] == "assistant" else ("", "")
        if reasoning:
            message = {key: value for key, value in message.items() if key != _FIELD} | {"content": answer}
            changed = True
        messages.append(message)
    if not changed:
        return None
    template_kwargs = {**(row.get("chat_template_kwargs") or {}), "enable_thinking": False}
    return {**row, "messages": messages, "chat_template_kwargs": template_kwargs}


def _cut_words(text: str, budget: int) -> str:
    words = text.split(maxsplit=budget)
    return text if len(words) <= budget else text[: len(text) - len(words[budget])].rstrip()


def _tokenizer_cut(folder: str) -> Callable[[str, int], str]:
    from nemotron_steps.models.chat import ChatFormat

    tokenizer: Any = ChatFormat.from_folder(folder).tokenizer

    def cut(text: str, budget: int) -> str:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        offsets = encoded["offset_mapping"]
        return text if len(offsets) <= budget else text[: offsets[budget][0]]

    return cut
