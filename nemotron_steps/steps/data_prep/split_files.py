"""Rows of preparations that hold all of them at once: a user's JSON Lines, unusable rows counted, files written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemotron_steps.artifacts.rows import read_rows
from nemotron_steps.errors import DataError
from nemotron_steps.steps.data_prep.gym_tasks import SPLITS, Split

if TYPE_CHECKING:
    from nemotron_steps.runs.context import Tracker

Row = dict[str, Any]
FEW = 0.5
"""Share of unusable rows up to which leaving them out is offered: above, it is the file that is not what was meant."""


def read_source(path: str, sample: int | None) -> list[tuple[str, Row]]:
    """("file:line", row) of a JSON Lines file, or of every *.jsonl file under a folder in name order.

    Args:
        sample: rows at most; None for all.

    Raises:
        DataError: nothing there, or a malformed or truncated line (file and line named).
    """
    root = Path(path)
    files = sorted(root.rglob("*.jsonl")) if root.is_dir() else [root]
    if not files or not files[0].is_file():
        raise DataError(
            "there is no JSON Lines data at the given path",
            where="jsonl.path",
            expected="a *.jsonl file, or a folder with some",
            found=path,
            hints=("jsonl.path=FILE.jsonl", "--input source=FILE.jsonl"),
        )
    rows: list[tuple[str, Row]] = []
    for file in files:
        for number, row in read_rows(file):
            if len(rows) == sample:
                return rows
            rows.append((f"{file}:{number}", row))
    return rows


def keep_usable(
    rows: Iterable[tuple[str, Row]],
    check: Callable[[str, Row], None],
    *,
    max_refused_share: float,
    tracker: Tracker,
) -> list[Row]:
    """The rows that `check` accepts, in order; every refused one is reported as an event.

    Args:
        check: raises DataError naming file, line and field.
        max_refused_share: above it nothing is kept.

    Raises:
        DataError: a larger share was refused; it shows the first, and offers to leave them out where they are few.
    """
    kept: list[Row] = []
    refused: list[DataError] = []
    for where, row in rows:
        try:
            check(where, row)
        except DataError as error:
            refused.append(error)
            if max_refused_share > 0:
                tracker.event("row_refused", where=error.where, reason=error.what)
        else:
            kept.append(row)
    total = len(kept) + len(refused)
    if len(refused) > max_refused_share * total:
        first, share = refused[0], len(refused) / total
        percent = 100 * len(refused) // total + 1  # above the share, which no rounding then falls below
        tolerated = (f"max_refused_share={percent / 100:.2f}",) if share <= FEW else ()
        raise DataError(
            f"{len(refused)} of {total} rows cannot be used; the first: {first.what}",
            where=first.where,
            expected=first.expected if max_refused_share == 0 else f"at most {max_refused_share:.1%} unusable rows",
            found=first.found if max_refused_share == 0 else f"{share:.1%}",
            hints=(*first.hints, *tolerated),
        )
    if refused:
        tracker.summary({"rows_refused": len(refused)})
    return kept


def write_splits(folder: Path, names: Mapping[Split, str], splits: Mapping[Split, Sequence[Row]]) -> dict[str, int]:
    """One JSON Lines file for every split that has rows. Returns split → rows."""
    counts: dict[str, int] = {}
    for split in SPLITS:
        if splits[split]:
            (folder / names[split]).parent.mkdir(exist_ok=True)
            with (folder / names[split]).open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in splits[split])
            counts[split] = len(splits[split])
    return counts
