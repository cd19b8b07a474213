"""Shards to split files: the last rows are held out, the rest trains; data sets are mixed evenly.

With one data set the order of its rows stays. With several, each is spread evenly over the whole, so the held-out rows
are a sample of all of them; rows that a weight above 1 repeats are repeated for training alone. The data sets
that a blend lists for a split are mixed, weighted and repeated by themselves, and nothing is cut from the rest for it.
"""

from __future__ import annotations

import heapq
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO, Literal, TypeVar

from nemotron_steps.artifacts.files import storage_errors
from nemotron_steps.config.schema.data_prep import SplitRows
from nemotron_steps.errors import DataError, show_line
from nemotron_steps.rows.lines import Row
from nemotron_steps.steps.data_prep.blends.shards import RowCounts, Shard

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
    """Whole groups in their order: validation and held-out rows first, the rest trains."""
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


@dataclass(frozen=True)
class DataSet:
    """The finished shards of one data set of a blend."""

    name: str
    shards: Sequence[Shard]
    weight: float = 1.0
    split: Split | None = None

    @property
    def rows(self) -> int:
        """Usable rows."""
        return sum(shard.row_counts.written for shard in self.shards)

    def lines(self) -> Iterator[bytes]:
        """Usable rows as lines."""
        for shard in self.shards:
            with shard.rows.open("rb", buffering=1 << 20) as file:
                yield from file


@dataclass(frozen=True)
class SplitSizes:
    """Rows from which each split begins: train from 0 to `train`, validation from `validation`, held out to the end."""

    train: int
    validation: int
    heldout: int
    total: int

    @classmethod
    def of(cls, total: int, sizes: SplitRows) -> SplitSizes:
        """Cut from the end, as published blends are split."""
        room = total - sizes.validation - sizes.heldout
        train = room if sizes.train is None else sizes.train
        if room < max(1, train):
            raise DataError(
                f"{total} rows are too few for the splits",
                where="rows",
                expected=f"{train if train > 0 else 1} for training + {sizes.validation} + {sizes.heldout}",
                found=str(total),
                hints=("rows.validation=0 rows.heldout=0",),
            )
        return cls(train, room, total - sizes.heldout, total)

    def rows_of(self, split: Split) -> int:
        """Rows of a split, none of them repeated."""
        ends = {"train": self.train, "validation": self.heldout - self.validation, "heldout": self.total - self.heldout}
        return ends[split]

    def split_of(self, place: int) -> Split | None:
        """Where the row at a place goes; None: nowhere."""
        if place < self.train:
            return "train"
        if place < self.validation:
            return None
        return "validation" if place < self.heldout else "heldout"


def write_split_files(
    data_sets: Sequence[DataSet], files: Mapping[Split, Path], sizes: SplitRows, counted: RowCounts
) -> dict[str, int]:
    """Write one JSON Lines file for every split that has rows. Returns split → rows."""
    own: dict[Split, list[DataSet]] = {split: [d for d in data_sets if d.split == split] for split in SPLITS[1:]}
    to_cut = [each for each in data_sets if each.split in (None, "train")]
    nothing_cut = {str(split): 0 for split, given in own.items() if given}
    if counted.left_out and not any(each.rows for each in to_cut):
        raise DataError(
            "0 rows are too few for the splits: every one was left out",
            expected="at least one row to train on",
            found="; ".join(f"{count}: {reason}" for reason, count in counted.left_out.most_common(3)),
            hints=[h for each in to_cut for s in each.shards[:1] for h in show_line(f"{s.task.part.file.place}:1")][:3],
        )
    cut = SplitSizes.of(sum(each.rows for each in to_cut), sizes.model_copy(update=nothing_cut))
    counts: dict[Split, int] = dict.fromkeys(SPLITS, 0)
    with ExitStack() as stack:
        stack.enter_context(storage_errors(files["train"]))

        def opened(split: Split) -> BinaryIO:
            files[split].parent.mkdir(parents=True, exist_ok=True)
            return stack.enter_context(files[split].open("wb", buffering=1 << 20))

        outs: dict[Split, BinaryIO] = {split: opened(split) for split in SPLITS if cut.rows_of(split)}
        if len(to_cut) == 1 and to_cut[0].weight <= 1:
            _write_in_order(to_cut[0], cut, outs, counts)
        else:
            _write_mixed(to_cut, cut, outs, counts)
        for split, given in own.items():
            if any(each.rows for each in given):
                counts[split] = _write_all(given, opened(split))
    counted.written = sum(counts.values())
    counted.unused = cut.validation - cut.train
    counted.added += counted.written + counted.unused - sum(each.rows for each in data_sets)
    return {split: count for split, count in counts.items() if count}


def _write_in_order(
    data_set: DataSet, cut: SplitSizes, outs: Mapping[Split, BinaryIO], counts: dict[Split, int]
) -> None:
    place = 0
    for shard in data_set.shards:
        end = place + shard.row_counts.written
        with shard.rows.open("rb", buffering=1 << 20) as lines:
            if end <= cut.train:
                shutil.copyfileobj(lines, outs["train"], 1 << 20)
                counts["train"] += end - place
            else:
                for at, line in enumerate(lines, start=place):
                    split = cut.split_of(at)
                    if split is not None:
                        outs[split].write(line)
                        counts[split] += 1
        place = end


def _write_mixed(
    data_sets: Sequence[DataSet], cut: SplitSizes, outs: Mapping[Split, BinaryIO], counts: dict[Split, int]
) -> None:
    for place, (which, number, line) in enumerate(_evenly(data_sets)):
        split = cut.split_of(place)
        if split is None:
            continue
        copies = _copies(data_sets[which], number) if split == "train" else 1
        outs[split].write(line * copies)
        counts[split] += copies


def _write_all(data_sets: Sequence[DataSet], out: BinaryIO) -> int:
    """Every row into one split, as often as its data set's weight says. Returns the rows written."""
    written = 0
    for which, number, line in _evenly(data_sets):
        copies = _copies(data_sets[which], number)
        out.write(line * copies)
        written += copies
    return written


def _evenly(data_sets: Sequence[DataSet]) -> Iterator[tuple[int, int, bytes]]:
    """(which data set, number of its row, line): next is always the data set that is least far."""
    rows = [each.rows for each in data_sets]
    lines = [each.lines() for each in data_sets]
    heap = [(0.5 / count, which, 0) for which, count in enumerate(rows) if count]
    heapq.heapify(heap)
    while heap:
        _, which, number = heap[0]
        yield which, number, next(lines[which])
        if number + 1 < rows[which]:
            heapq.heapreplace(heap, ((number + 1.5) / rows[which], which, number + 1))
        else:
            heapq.heappop(heap)


def _copies(data_set: DataSet, number: int) -> int:
    """How often a row is trained on: the weight, its fraction drawn from the row's place."""
    whole = int(data_set.weight)
    if data_set.weight <= 1 or whole == data_set.weight:
        return max(1, whole)
    draw = int.from_bytes(blake2b(f"{data_set.name}:{number}".encode(), digest_size=7).digest()) / (1 << 56)
    return whole + (draw < data_set.weight - whole)
