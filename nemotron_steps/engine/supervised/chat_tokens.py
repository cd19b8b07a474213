"""Chats as tokens: which of them an assistant wrote. No torch: data preparation does this in many processes.

A row is {"messages": [{"role", "content"}, ...]} as JSON Lines; every assistant turn is trained, nothing else. `tools`
and `chat_template_kwargs` (`{"enable_thinking": false}`) of a row are given to the chat template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from nemotron_steps.errors import DataError, first_line, show_line
from nemotron_steps.models.chat import left_out
from nemotron_steps.rows.messages import read_messages, read_template_kwargs, read_tools

if TYPE_CHECKING:
    from nemotron_steps.models.chat import ChatFormat


@dataclass(frozen=True)
class ChatSequence:
    """Token ids and, for each, whether it is trained."""

    token_ids: list[int]
    token_mask: list[int]


def encode_chat(
    chat: ChatFormat, messages: Sequence[Mapping[str, Any]], where: str, row: Mapping[str, Any]
) -> ChatSequence:
    """Tokens of one chat. Each assistant turn is tokenised apart from what precedes it, exactly as a generator that
    continues the prompt would have produced it.

    Args:
        row: the chat's row, for its tools and chat_template_kwargs.

    Raises:
        DataError: no assistant turn, a template that refuses the chat or rewrites earlier turns, or
            chat_template_kwargs that are none.
    """
    tools = read_tools(row.get("tools"), where, "tools")
    messages = read_messages(messages, where, "messages", None)
    chat = chat.with_template_kwargs(read_template_kwargs(row.get("chat_template_kwargs"), where))
    token_ids: list[int] = []
    token_mask: list[int] = []
    rendered = ""

    def extend(text: str, trained: int) -> None:
        ids = chat.encode(text)
        token_ids.extend(ids)
        token_mask.extend([trained] * len(ids))

    turns = [dict(m) for m in messages]
    for position, message in enumerate(turns):
        if message.get("role") != "assistant":
            continue
        try:
            before = chat.render_text(turns[:position], tools, generation_prompt=True)
            after = chat.render_text(turns[: position + 1], tools, generation_prompt=False)
        except (TemplateError, TypeError, ValueError) as error:  # `raise_exception`; a value that it cannot write
            raise DataError(
                "the chat template refuses the chat",
                where=where,
                expected="turns as the template of the tokenizer takes them",
                found=first_line(error),
                hints=show_line(where),
            ) from error
        if missing := left_out(turns[:position], before):
            raise DataError(
                f"the chat template leaves out the {missing[0]} message",
                where=where,
                expected="a model whose template writes that role, or comparisons that any template writes",
                hints=("comparisons.layout=plain   # of data_prep/sft_prep", *show_line(where)),
            )
        if not before.startswith(rendered) or not after.startswith(before):
            raise DataError(
                "the chat template rewrites earlier turns",
                where=where,
                expected="turns that stay as they are when more follow",
                found="a template that drops or changes something of them, often reasoning",
                hints=("make a row of each assistant turn, with the turns before it", *show_line(where)),
            )
        extend(before[len(rendered) :], 0)
        # The template may write a separator after the end token; the generator stops at the end token.
        said, found_end, rest = after[len(before) :].partition(chat.eos_text)
        extend(said + found_end, 1)
        extend(rest, 0)
        rendered = after
    if not any(token_mask):
        raise DataError(
            "the chat has no assistant turn to learn from",
            where=where,
            expected="role: assistant",
            hints=show_line(where),
        )
    last = len(token_mask) - token_mask[::-1].index(1)
    return ChatSequence(token_ids[:last], token_mask[:last])
