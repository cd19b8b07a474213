"""Prompts for training: JSON Lines rows in a seeded order whose position can be saved and restored.

Row format: NeMo-Gym's (`responses_create_params`, verifier fields, `agent_ref`).
"""

from __future__ import annotations

import json
import random
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemotron_steps.errors import DataError, show_line


@dataclass(frozen=True)
class PromptRow:
    """One row and where it came from."""

    index: int
    """0-based position in the file."""
    row: dict[str, Any]
    where: str
    """file:line, for errors."""


def read_rows(path: str | Path) -> list[PromptRow]:
    """Every row of a JSON Lines file. DataError names file and line of the first malformed one."""
    rows: list[PromptRow] = []
    file = Path(path)
    if not file.is_file():
        raise DataError(f"no such prompt file: {file}", hints=["data.train.data_path=PATH/train-split.jsonl"])
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{file}:{number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                truncated = not line.endswith(b"\n")
                what = "the last line is truncated" if truncated else "not valid JSON"
                whole = (f"sed '$d' {shlex.quote(str(file))} > WHOLE.jsonl   # without it",) if truncated else ()
                raise DataError(
                    what,
                    where=where,
                    expected="one JSON object a line",
                    found=str(error),
                    hints=(*whole, *show_line(where)),
                ) from error
            if not isinstance(row, dict):
                raise DataError(
                    "not a JSON object",
                    where=where,
                    expected="an object",
                    found=type(row).__name__,
                    hints=show_line(where),
                )
            rows.append(PromptRow(len(rows), row, where))
    if not rows:
        raise DataError(
            "the file has no rows",
            where=str(file),
            expected="at least one row",
            hints=["steps run data_prep/rl_prep --input source=PATH   # makes files of prompts"],
        )
    return rows


class PromptStream:
    """Batches of rows, epoch after epoch; each epoch is a permutation drawn from (seed, epoch).

    The state is two numbers, so a resumed run serves exactly the prompts that the cut-off one had not.
    """

    def __init__(self, rows: list[PromptRow], *, batch_size: int, max_epochs: int, seed: int, shuffle: bool) -> None:
        if len(rows) < batch_size:
            raise DataError(
                f"{len(rows)} prompts are fewer than one step needs",
                expected=f"at least grpo.num_prompts_per_step = {batch_size}",
                hints=[f"grpo.num_prompts_per_step={len(rows)}"],
            )
        self._rows = rows
        self._batch_size = batch_size
        self._max_epochs = max_epochs
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._position = 0
        self._cached_order: tuple[int, list[int]] = (-1, [])

    def _order(self, epoch: int) -> list[int]:
        if self._cached_order[0] != epoch:
            order = list(range(len(self._rows)))
            if self._shuffle:
                random.Random(f"{self._seed}:{epoch}").shuffle(order)
            self._cached_order = (epoch, order)
        return self._cached_order[1]

    def __iter__(self) -> Iterator[list[PromptRow]]:
        """Full batches only; the rest of an epoch that does not fill one is left out.

        Iterators share the stream's position: whichever is asked next goes on where the last one was.
        """
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
        return self._max_epochs * self.steps_per_epoch() * self._batch_size

    def at(self, position: int) -> PromptRow:
        """The prompt at a place of the whole order, as iterating would serve it."""
        per_epoch = self.steps_per_epoch() * self._batch_size
        return self._rows[self._order(position // per_epoch)[position % per_epoch]]

    @property
    def epoch(self) -> int:
        """Epochs completed."""
        return self._epoch

    def steps_per_epoch(self) -> int:
        """Full batches in one epoch."""
        return len(self._rows) // self._batch_size

    def state_dict(self) -> dict[str, int]:
        """Position after the batches served so far."""
        return {"epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a saved position."""
        self._epoch = int(state["epoch"])
        self._position = int(state["position"])
