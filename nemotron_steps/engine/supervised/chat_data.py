"""Chats as training sequences: which tokens an assistant wrote, and padded batches of them.

A row is {"messages": [{"role", "content"}, ...]} as JSON Lines; every assistant turn is trained, nothing else. `tools`
and `chat_template_kwargs` (`{"enable_thinking": false}`) of a row are given to the chat template.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from nemotron_steps.engine.types import TrainBatch
from nemotron_steps.errors import DataError, show_line
from nemotron_steps.models.chat import ChatFormat

Example = TypeVar("Example")


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
        DataError: no assistant turn, a template that rewrites earlier turns, or chat_template_kwargs that are none.
    """
    tools = row.get("tools") or ()
    chat = chat.with_template_kwargs(_template_kwargs(row, where))
    token_ids: list[int] = []
    token_mask: list[int] = []
    rendered = ""

    def extend(text: str, trained: int) -> None:
        ids = chat.tokenizer.encode(text, add_special_tokens=False)
        token_ids.extend(ids)
        token_mask.extend([trained] * len(ids))

    turns = [dict(m) for m in messages]
    for position, message in enumerate(turns):
        if message.get("role") != "assistant":
            continue
        before = chat.render_text(turns[:position], tools, generation_prompt=True)
        after = chat.render_text(turns[: position + 1], tools, generation_prompt=False)
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
        end = chat.decode_token(chat.eos_token_id)
        said, found_end, rest = after[len(before) :].partition(end)
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


def _template_kwargs(row: Mapping[str, Any], where: str) -> Mapping[str, Any] | None:
    """A row's own variables of the chat template. DataError if they are none."""
    template_kwargs = row.get("chat_template_kwargs")
    if template_kwargs is not None and not isinstance(template_kwargs, Mapping):
        raise DataError(
            "chat_template_kwargs must be an object",
            where=f"{where} field chat_template_kwargs",
            expected='{"enable_thinking": false}',
            found=type(template_kwargs).__name__,
            hints=show_line(where),
        )
    return template_kwargs


def batch_of(sequences: Sequence[ChatSequence], pad_id: int = 0, divisible_by: int = 1) -> TrainBatch:
    """Sequences as one right-padded TrainBatch with unit advantages.

    Args:
        divisible_by: T is rounded up to a multiple of this.
    """
    longest = max(len(s.token_ids) for s in sequences)
    longest = -(-longest // divisible_by) * divisible_by
    input_ids = torch.full((len(sequences), longest), pad_id, dtype=torch.int64)
    token_mask = torch.zeros(len(sequences), longest)
    for row, sequence in enumerate(sequences):
        length = len(sequence.token_ids)
        input_ids[row, :length] = torch.tensor(sequence.token_ids)
        token_mask[row, :length] = torch.tensor(sequence.token_mask, dtype=torch.float32)
    return TrainBatch(
        input_ids=input_ids,
        lengths=torch.tensor([len(s.token_ids) for s in sequences]),
        token_mask=token_mask,
        sample_mask=torch.ones(len(sequences)),
        generation_logprobs=torch.zeros(len(sequences), longest),
        advantages=torch.ones(len(sequences), longest),
    )


def shuffled_batches(
    sequences: Sequence[Example], batch_size: int, *, epochs: int, seed: int, skip: int = 0
) -> Iterator[list[Example]]:
    """Full batches, epoch after epoch, in an order drawn from (seed, epoch); the first `skip` batches are passed over
    without being made, which is how a resumed run finds its place."""
    per_epoch = len(sequences) // batch_size
    if per_epoch == 0:
        raise DataError(
            f"{len(sequences)} examples are fewer than one batch",
            expected=f"at least policy.train_global_batch_size = {batch_size}",
            hints=[f"policy.train_global_batch_size={len(sequences)}"],
        )
    for epoch in range(skip // per_epoch, epochs):
        order = list(range(len(sequences)))
        random.Random(f"{seed}:{epoch}").shuffle(order)
        start = skip % per_epoch if epoch == skip // per_epoch else 0
        for index in range(start, per_epoch):
            yield [sequences[i] for i in order[index * batch_size : (index + 1) * batch_size]]
