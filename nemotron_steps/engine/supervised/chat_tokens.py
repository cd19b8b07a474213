"""Chats as tokens: which of them an assistant wrote. No torch: data preparation does this in many processes.

A row is {"messages": [{"role", "content"}, ...]} as JSON Lines; every assistant turn is trained, nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from os.path import commonprefix
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from nemotron_steps.config.turn_ends import word_absent_from
from nemotron_steps.engine.rollouts.data import PromptRow, PromptRows, Rows
from nemotron_steps.errors import DataError, first_line, show_line
from nemotron_steps.rows.layouts import check_packed
from nemotron_steps.rows.messages import read_messages, read_template_kwargs, read_tools, wrong

if TYPE_CHECKING:
    from nemotron_steps.models.chat import ChatFormat


@dataclass(frozen=True)
class ChatSequence:
    """Token ids and, for each, whether it is trained."""

    token_ids: list[int]
    token_mask: list[int]


def chat_sequences(
    chat: ChatFormat, messages: Sequence[Mapping[str, Any]], where: str, row: Mapping[str, Any]
) -> list[ChatSequence]:
    """Tokens of one chat: one sequence where the template keeps earlier turns as they are.

    Each assistant turn is tokenised apart from what precedes it, exactly as a generator that continues the prompt would
    have produced it. Where a template shows earlier turns otherwise when more follow (Qwen3 drops their reasoning), a
    sequence begins with each turn that finds them changed: the turns before it as a generator would see them then, and
    not trained again. A greeting that the template cannot ask for is shown and not trained.
    """
    tools = read_tools(row.get("tools"), where, "tools")
    messages = read_messages(messages, where, "messages", None)
    chat = chat.with_template_kwargs(read_template_kwargs(row.get("chat_template_kwargs"), where), where)
    sequences: list[ChatSequence] = []
    rendered = rest = ""

    def extend(text: str, after: str, trained: int) -> None:
        ids = chat.encode(text, after)
        sequences[-1].token_ids.extend(ids)
        sequences[-1].token_mask.extend([trained] * len(ids))

    turns = [dict(m) for m in messages]
    shown = 0
    for position, message in enumerate(turns):
        if message.get("role") != "assistant":
            continue
        try:
            before = chat.render_text(turns[:position], tools)
            after = chat.render_text(turns[: position + 1], tools, generation_prompt=False)
            found = _asked_and_answered(chat, turns[: position + 1], tools, before, after)
        except (TemplateError, TypeError, ValueError) as error:  # `raise_exception`; a value that it cannot write
            asks = [each.get("role") not in ("system", "developer", "assistant") for each in turns]
            if any(asks) and not any(asks[:position]):  # a greeting, which nothing asks for: shown, and not trained
                continue
            raise DataError(
                "the chat template refuses the chat",
                where=where,
                expected="turns as the template of the tokenizer takes them",
                found=first_line(error),
                hints=show_line(where),
            ) from error
        if found is None:
            raise DataError(
                "the chat template shows an answer otherwise than it asks for it",
                where=where,
                expected=f"a chat that begins with its generation prompt: {before[-60:]!r}",
                found=repr(after[-60:]),
                hints=show_line(where),
            )
        asked, answer = found
        if not sequences or not asked.startswith(rendered):
            sequences.append(ChatSequence([], []))
            rendered = rest = ""
        elif asked.startswith(rendered + rest):
            extend(rest, rendered, 0)
            rendered += rest
        new = turns[shown : position + 1]
        own = {"principle", "response_1", "response_2"}.intersection(message.get("role") for message in new)
        plain = ("comparisons.layout=plain   # of data_prep/sft_prep: any template writes it",) if own else ()
        text, hints = asked[len(rendered) :], (*plain, *show_line(where))
        chat.require_shown(text + answer, new, () if shown else tools, where=where, hints=hints)
        shown = position + 1
        # The template may write a separator after the end token; the generator stops at the end token.
        end = chat.turn_end(answer)
        extend(text, rendered, 0)
        weight = message.get("weight", 1)  # as OpenAI's fine-tuning takes it
        if weight not in (0, 1):
            kept = "0 keeps the turn out of the loss"
            raise wrong("must be 0 or 1", where, "messages.weight", expected=kept, found=weight)
        extend(answer[:end], asked, int(weight))
        rendered, rest = asked + answer[:end], answer[end:]
    weights = {message.get("weight") for message in turns if message.get("role") == "assistant"}
    if not any(any(sequence.token_mask) for sequence in sequences):
        raise DataError(
            "the chat has no assistant turn to learn from",
            where=where,
            expected="an assistant message that is trained, after a message that asks for it",
            found="only turns of weight 0" if weights == {0} else None,
            hints=show_line(where),
        )
    lasts = [(s, max((i for i, m in enumerate(s.token_mask) if m), default=-1) + 1) for s in sequences]
    return [ChatSequence(s.token_ids[:last], s.token_mask[:last]) for s, last in lasts if last]  # to the last trained


def _asked_and_answered(
    chat: ChatFormat, turns: Sequence[dict[str, Any]], tools: Sequence[Any], before: str, after: str
) -> tuple[str, str] | None:
    """What a generator sees before the last of the turns, and what the template writes of that one; None where that
    cannot be told. `before` is the chat until then, with its generation prompt, `after` that with the last turn.

    Mostly the chat until then, and what the turn adds. Some templates ask for reasoning that a turn without any has not
    (DeepSeek-R1, Nemotron 3): it begins where the two part, and no later than where its header ends. Others show
    earlier messages otherwise once they are answered (gpt-oss drops reasoning, Mistral a system message): what the turn
    adds to one question it adds to any.
    """
    *earlier, turn = turns
    if after.startswith(before):
        return before, after[len(before) :]
    mark = word_absent_from(before + after)
    stub = [*earlier, {"role": "assistant", "content": mark}]
    header = chat.render_text(stub, tools, generation_prompt=False).partition(mark)[0]
    asked = commonprefix([before, after, header])  # noqa: RUF071  by characters
    if earlier and len(asked) > len(chat.render_text(earlier, tools, generation_prompt=False)):
        return asked, after[len(asked) :]
    question = {"role": "user", "content": "x"}
    asked = chat.render_text([question], tools)
    answered = chat.render_text([question, turn], tools, generation_prompt=False)
    if answered.startswith(asked) and after.endswith(answered[len(asked) :]):
        return before, answered[len(asked) :]
    return None


def none_fits(of: str, count: int, path: str | Path, max_length: int, longest: int) -> DataError:
    """The error of a file whose every chat or pair is too long."""
    return DataError(
        f"all {count} {of} are longer than policy.max_total_sequence_length = {max_length}",
        where=str(path),
        expected=f"{of} of at most {max_length} tokens",
        found=f"up to {longest}",
        hints=(f"policy.max_total_sequence_length={longest}",),
    )


@dataclass(frozen=True)
class PackedRow:
    """Chats that share a row."""

    chats: tuple[ChatSequence, ...]


SftExample = ChatSequence | PackedRow
"""What a step of supervised fine-tuning counts."""


def read_packed(file: Path, *, max_length: int, vocabulary: int) -> Rows[PackedRow]:
    """The rows of a packed data set, read when they are asked for."""

    def check(row: PromptRow) -> None:
        check_packed(row.row, row.where)
        _check(row, max_length, vocabulary)

    rows = PromptRows(file, check)
    return Rows(len(rows), lambda place: PackedRow(tuple(chats_of(rows[place].row))))


def chats_of(row: dict[str, Any]) -> Iterator[ChatSequence]:
    """The chats of a packed row."""
    ids, mask, starts = row["input_ids"], row["loss_mask"], row["seq_start_id"]
    for start, end in pairwise([*starts, len(ids)]):
        yield ChatSequence(ids[start:end], [0, *mask[start : end - 1]])


def row_of(chats: Sequence[ChatSequence]) -> dict[str, list[int]]:
    """The packed row of some chats: the inverse of chats_of."""
    row: dict[str, list[int]] = {"input_ids": [], "loss_mask": [], "seq_start_id": []}
    for chat in chats:
        row["seq_start_id"].append(len(row["input_ids"]))
        row["input_ids"] += chat.token_ids
        row["loss_mask"] += [*chat.token_mask[1:], 0]
    return row


def _check(row: PromptRow, max_length: int, vocabulary: int) -> None:
    ids, starts = row.row["input_ids"], row.row["seq_start_id"]
    longest = max(end - start for start, end in pairwise([*starts, len(ids)]))
    if longest > max_length:
        raise DataError(
            f"a packed chat is longer than policy.max_total_sequence_length = {max_length}",
            where=row.where,
            expected=f"chats of at most {max_length} tokens",
            found=str(longest),
            hints=(f"policy.max_total_sequence_length={longest}", f"packing.pack_size={max_length}   # when packing"),
        )
    if max(ids) >= vocabulary:
        raise DataError(
            "the row was packed with another tokenizer",
            where=f"{row.where} field input_ids",
            expected=f"tokens below {vocabulary}",
            found=str(max(ids)),
            hints=("steps run data_prep/sft_packing --input chats=PATH packing.tokenizer=PATH   # packs them again",),
        )
