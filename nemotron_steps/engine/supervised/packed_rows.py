"""Chats that were packed ahead of training: rows of several, each read from its file when it is asked for.

A row of the file is {"input_ids", "loss_mask", "seq_start_id"}, as Megatron-Bridge's packed data sets have it: the
tokens of several chats, one after the other; whether the token *after* each is trained; where each chat begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, overload

from nemotron_steps.engine.rollouts.data import PromptRow, PromptRows
from nemotron_steps.engine.supervised.chat_tokens import ChatSequence
from nemotron_steps.errors import DataError
from nemotron_steps.rows.layouts import check_packed


@dataclass(frozen=True)
class PackedRow:
    """Chats that share a row."""

    chats: tuple[ChatSequence, ...]


SftExample = ChatSequence | PackedRow
"""What a step of supervised fine-tuning counts."""


class PackedRows(Sequence[PackedRow]):
    """The rows of a packed data set, read when they are asked for.

    Args:
        file: JSON Lines.
        max_length: tokens of a chat at most.
        vocabulary: token ids are below it.

    Raises:
        DataError: a row that is none, a chat that is too long, or a token that the tokenizer does not have.
    """

    def __init__(self, file: Path, *, max_length: int, vocabulary: int) -> None:
        def check(row: PromptRow) -> None:
            check_packed(row.row, row.where)
            _check(row, max_length, vocabulary)

        self._rows = PromptRows(file, check)

    def __len__(self) -> int:
        """How many rows there are."""
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> PackedRow: ...

    @overload
    def __getitem__(self, index: slice) -> list[PackedRow]: ...

    def __getitem__(self, index: int | slice) -> PackedRow | list[PackedRow]:
        """The row at a place, or a list of the rows of a slice."""
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        return PackedRow(tuple(chats_of(self._rows[index].row)))


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
