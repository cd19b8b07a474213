"""Prompts for training: JSON Lines rows in a seeded order whose position can be saved and restored.

Row format: NeMo-Gym's (`responses_create_params`, verifier fields, `agent_ref`).
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from nemotron_steps.errors import DataError
from nemotron_steps.rows.layouts import REQUEST, read_request
from nemotron_steps.rows.lines import LONGEST_LINE, parse_row
from nemotron_steps.rows.messages import decoded


@dataclass(frozen=True)
class PromptRow:
    """One row and where it came from."""

    index: int
    """0-based position in the file."""
    row: dict[str, Any]
    where: str
    """file:line, for errors."""


Item = TypeVar("Item")


class Rows(Sequence[Item]):
    """Rows that are found when they are asked for, by their place from 0 on."""

    def __init__(self, count: int, at: Callable[[int], Item]) -> None:
        self._count, self.at = count, at

    def __len__(self) -> int:
        """How many rows there are."""
        return self._count

    def __getitem__(self, index: Any) -> Any:
        """The row at a place, or a list of the rows of a slice."""
        places = range(self._count)[index]
        return self.at(places) if isinstance(places, int) else [self.at(place) for place in places]


class PromptRows(Rows[PromptRow]):
    """The rows of a JSON Lines file, each read from the file when it is asked for: a million prompts are 16 MB here."""

    def __init__(self, file: Path, check: Callable[[PromptRow], None] | None = None) -> None:
        self._file = file
        self._offsets, self._lines = array("Q"), array("Q")
        self._stamp = _stamp(file)
        offset = 0
        with file.open("rb") as lines:
            # Bounded, so that a file of another kind is told before it is in memory.
            for number, line in enumerate(iter(lambda: lines.readline(LONGEST_LINE + 1), b""), start=1):
                if line.strip():
                    row, _ = parse_row(line, f"{file}:{number}")
                    if check is not None:
                        check(PromptRow(len(self._offsets), row, f"{file}:{number}"))
                    self._offsets.append(offset)
                    self._lines.append(number)
                offset += len(line)
        self._end = offset
        super().__init__(len(self._offsets), self._read)

    def places_over(self, size: int) -> list[int]:
        """Places of the rows whose line has more bytes than that, without reading them."""
        ends = chain(self._offsets[1:], (self._end,))
        return [place for place, (start, end) in enumerate(zip(self._offsets, ends, strict=True)) if end - start > size]

    def _read(self, place: int) -> PromptRow:
        with self._unchanged() as file:
            file.seek(self._offsets[place])
            return self._row(place, file.readline())

    def __iter__(self) -> Iterator[PromptRow]:
        """Every row, in the order of the file."""
        with self._unchanged() as file:
            for place, offset in enumerate(self._offsets):
                file.seek(offset)
                yield self._row(place, file.readline())

    def _row(self, place: int, line: bytes) -> PromptRow:
        where = f"{self._file}:{self._lines[place]}"
        return PromptRow(place, parse_row(line, where)[0], where)

    @contextmanager
    def _unchanged(self) -> Iterator[BinaryIO]:
        if _stamp(self._file) != self._stamp:
            raise DataError(
                "the prompt file was changed while it was used",
                where=str(self._file),
                hints=["run the same command again: it starts with the file as it is now"],
            )
        with self._file.open("rb") as file:
            yield file


def read_rows(path: str | Path) -> PromptRows:
    """Every row of a JSON Lines file. DataError names file and line of the first malformed one."""
    file = Path(path)
    if not file.is_file():
        raise DataError(f"no such prompt file: {file}", hints=["data.train.data_path=PATH/train-split.jsonl"])
    rows = PromptRows(file)
    if not rows:
        raise DataError(
            "the file has no rows",
            where=str(file),
            expected="at least one row",
            hints=["steps run data_prep/rl_prep --input source=PATH   # makes files of prompts"],
        )
    return rows


def _stamp(file: Path) -> tuple[int, int]:
    status = file.stat()
    return status.st_size, status.st_mtime_ns


class PromptStream:
    """Batches of rows; each epoch is a permutation drawn from (seed, epoch)."""

    def __init__(
        self, rows: Sequence[PromptRow], *, batch_size: int, max_epochs: int, seed: int, shuffle: bool
    ) -> None:
        if len(rows) < batch_size:
            raise DataError(
                f"{len(rows)} prompts are fewer than one step needs",
                expected=f"at least grpo.num_prompts_per_step = {batch_size}",
                hints=[f"grpo.num_prompts_per_step={len(rows)}"],
            )
        self._rows, self._batch_size, self._max_epochs = rows, batch_size, max_epochs
        self._seed, self._shuffle = seed, shuffle
        self._epoch = self._position = 0
        self._steps_per_epoch = len(rows) // batch_size  # full batches
        self._cached_order: tuple[int, array[int]] = (-1, array("Q"))

    def _order(self, epoch: int) -> array[int]:
        if self._cached_order[0] != epoch:
            order = array("Q", range(len(self._rows)))
            if self._shuffle:
                random.Random(f"{self._seed}:{epoch}").shuffle(order)
            self._cached_order = (epoch, order)
        return self._cached_order[1]

    def __iter__(self) -> Iterator[list[PromptRow]]:
        """Full batches only; the rest of an epoch that does not fill one is left out."""
        while self._epoch < self._max_epochs:
            order = self._order(self._epoch)
            if self._position + self._batch_size > len(order):
                self._epoch += 1
                self._position = 0
                continue
            picked = order[self._position : self._position + self._batch_size]
            self._position += self._batch_size
            yield [self._rows[i] for i in picked]

    @property
    def num_rows(self) -> int:
        """Rows of the file."""
        return len(self._rows)

    @property
    def num_positions(self) -> int:
        """Prompts served over all epochs."""
        return self._max_epochs * self._steps_per_epoch * self._batch_size

    def at(self, position: int) -> PromptRow:
        """The prompt at a place of the whole order, as iterating would serve it."""
        per_epoch = self._steps_per_epoch * self._batch_size
        return self._rows[self._order(position // per_epoch)[position % per_epoch]]

    def num_steps(self, at_most: int) -> int:
        """Steps that the prompts give in all epochs, or `at_most`."""
        return min(at_most, self._max_epochs * self._steps_per_epoch)

    def state_dict(self) -> dict[str, int]:
        """Position after the batches served so far."""
        return {"epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a saved position."""
        self._epoch = int(state["epoch"])
        self._position = int(state["position"])


def asks_for_low_effort(row: Mapping[str, Any], where: str, string: str) -> bool:
    """Whether the last user message of a prompt contains `string`, in its text or in a part of it."""
    messages = read_request(row, where).messages
    return string in next((m["content"] for m in reversed(messages) if m["role"] == "user"), "")


def with_instruction(messages: Sequence[Mapping[str, Any]], instruction: str) -> list[dict[str, Any]]:
    """A prompt with `instruction` at the end of its last user message, wherever that stands: a tool's result or an
    earlier answer is not the place to ask for anything."""
    asked = [dict(message) for message in messages]
    users = [i for i, m in enumerate(asked) if (m.get("type") or "message") == "message" and m.get("role") == "user"]
    if not users:
        return [*asked, {"role": "user", "content": instruction}]
    last = asked[users[-1]]
    content = last.get("content")
    parts = [content] if isinstance(content, str | Mapping) else list(content or ())
    if any(instruction in (part if isinstance(part, str) else part.get("text") or "") for part in parts):
        return asked
    if isinstance(content, str):
        longer: Any = f"{content}\n\n{instruction}"
    else:
        longer = [*parts, {"type": "input_text", "text": f"\n\n{instruction}" if parts else instruction}]
    asked[users[-1]] = {**last, "content": longer}
    return asked


def low_effort_row(row: Mapping[str, Any], string: str) -> dict[str, Any]:
    """A prompt row whose last user message ends with `string`."""
    request = decoded(row[REQUEST])
    given = decoded(request["input"])
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    return {**row, REQUEST: {**request, "input": with_instruction(items, string)}}
