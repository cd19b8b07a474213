"""The splits of a preparation: their names, their files, and whole groups of rows dealt out to them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeVar

from nemotron_steps.config.schema.data_prep import SplitRows
from nemotron_steps.errors import DataError
from nemotron_steps.rows.lines import Row

Split = Literal["train", "validation", "heldout"]
SPLITS: tuple[Split, ...] = ("train", "validation", "heldout")
FILES: dict[Split, str] = {"train": "train.jsonl", "validation": "validation.jsonl", "heldout": "heldout.jsonl"}
PROMPT_FILES: dict[Split, str] = {
    "train": "train-split.jsonl",
    "validation": "val-split.jsonl",
    "heldout": "heldout.jsonl",
}
"""As the published preparations name them."""
TOKENIZER_FOLDER = "tokenizer"
"""Beside the splits, where they have a tokenizer of their own."""

Item = TypeVar("Item")


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


def split_groups(
    groups: Iterable[Sequence[Item]], sizes: SplitRows, *, of: str, hints: Sequence[str] = ()
) -> dict[Split, list[Item]]:
    """Whole groups in their order: validation and held-out rows first, the rest trains.

    Validation and held-out rows may be a few more than asked for, so that their last group stays whole.

    Args:
        of: what the items are, for the error.

    Raises:
        DataError: too few are left for training.
    """
    splits: dict[Split, list[Item]] = {split: [] for split in SPLITS}
    wanted: dict[Split, int] = {"validation": sizes.validation, "heldout": sizes.heldout}
    for group in groups:
        split: Split = next((s for s, count in wanted.items() if len(splits[s]) < count), "train")
        splits[split] += group
    if len(splits["train"]) < (sizes.train or 1):
        raise DataError(
            f"{sum(map(len, splits.values()))} {of} are too few for the splits",
            where="rows",
            expected=f"{sizes.train or 1} for training + {sizes.validation} + {sizes.heldout}",
            found=f"{len(splits['train'])} left for training",
            hints=("rows.validation=0 rows.heldout=0", *hints),
        )
    splits["train"] = splits["train"][: sizes.train]
    return splits
