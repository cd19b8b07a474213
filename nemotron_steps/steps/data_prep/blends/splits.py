"""Shards to split files: the last rows are held out, the rest trains; data sets are spread evenly over the whole. Data
sets that a blend lists for a split are mixed by themselves."""

import heapq
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
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
TOKENIZER_FOLDER = "tokenizer"

Item = TypeVar("Item")


def wanted_rows(sizes: SplitRows) -> dict[Split, int]:
    """Rows to be made for each split."""
    return {"train": sizes.train or 0, "validation": sizes.validation, "heldout": sizes.heldout}


def split_at(place: float, heldout: float, validation: float) -> Split:
    """The split of what a hash puts at a place in [0, 1), given the shares of the other splits."""
    if place < heldout:
        return "heldout"
    return "validation" if place < heldout + validation else "train"


def write_splits(folder: Path, names: Mapping[Split, str], splits: Mapping[Split, Sequence[Row]]) -> dict[str, int]:
    """One JSON Lines file for every split that has rows. Returns split → rows."""
    for split in SPLITS:
        if splits[split]:
            (folder / names[split]).parent.mkdir(exist_ok=True)
            with (folder / names[split]).open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in splits[split])
    return {split: len(splits[split]) for split in SPLITS if splits[split]}


def split_groups(
    groups: Iterable[Sequence[Item]], sizes: SplitRows, *, of: str, hints: Sequence[str] = ()
) -> dict[Split, list[Item]]:
    """Whole groups: validation and held-out rows first, perhaps a few more than asked for; the rest trains."""
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
    """The finished shards of a `prepare.Source`, in the order of its rows."""

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
            with shard.task.path("rows").open("rb", buffering=1 << 20) as file:
                yield from file


def places(total: int, sizes: SplitRows) -> dict[Split, range]:
    """The rows of each split, validation and held-out ones cut from the end, as published blends are split."""
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
    heldout = total - sizes.heldout
    return {"train": range(train), "validation": range(room, heldout), "heldout": range(heldout, total)}


def write_split_files(
    data_sets: Sequence[DataSet], files: Mapping[Split, Path], sizes: SplitRows, counted: RowCounts
) -> dict[str, int]:
    """Write the file of each split; `sizes` are of those without data sets of their own. Split → rows."""
    own: dict[Split, list[DataSet]] = {split: [d for d in data_sets if d.split == split] for split in SPLITS[1:]}
    to_cut = [each for each in data_sets if each.split in (None, "train")]
    nothing_cut = {str(split): 0 for split, given in own.items() if given}
    total = sum(each.rows for each in to_cut)
    if counted.left_out and not total:
        raise DataError(
            "0 rows are too few for the splits: every one was left out",
            found="; ".join(f"{count}: {reason}" for reason, count in counted.left_out.most_common(3)),
            hints=[h for each in to_cut for s in each.shards[:1] for h in show_line(f"{s.task.part.file.place}:1")][:3],
        )
    cut = places(total, sizes.model_copy(update=nothing_cut))
    counts: dict[Split, int] = dict.fromkeys(SPLITS, 0)
    outs: dict[Split, BinaryIO] = {}
    with ExitStack() as stack:
        stack.enter_context(storage_errors(files["train"]))
        for split in SPLITS:
            if cut[split] or any(each.rows for each in own.get(split, ())):
                files[split].parent.mkdir(parents=True, exist_ok=True)
                outs[split] = stack.enter_context(files[split].open("wb", buffering=1 << 20))
        if len(to_cut) == 1 and to_cut[0].weight <= 1:  # in order, many times faster
            lines, place = to_cut[0].lines(), 0
            for split, of_split in cut.items():
                if of_split:
                    outs[split].writelines(islice(lines, of_split.start - place, of_split.stop - place))
                    counts[split], place = len(of_split), of_split.stop
        else:
            for place, (data_set, number, line) in enumerate(_evenly(to_cut)):
                for split in (name for name, of_split in cut.items() if place in of_split):
                    copies = _copies(data_set, number) if split == "train" else 1
                    outs[split].write(line * copies)
                    counts[split] += copies
        for split, given in own.items():
            for data_set, number, line in _evenly(given):
                copies = _copies(data_set, number)
                outs[split].write(line * copies)
                counts[split] += copies
    counted.written = sum(counts.values())
    counted.unused = total - sum(map(len, cut.values()))
    counted.added += counted.written + counted.unused - sum(each.rows for each in data_sets)
    return {split: count for split, count in counts.items() if count}


def _evenly(data_sets: Sequence[DataSet]) -> Iterator[tuple[DataSet, int, bytes]]:
    rows = [each.rows for each in data_sets]
    lines = [each.lines() for each in data_sets]
    heap = [(0.5 / count, which, 0) for which, count in enumerate(rows) if count]
    heapq.heapify(heap)
    while heap:
        _, which, number = heap[0]
        yield data_sets[which], number, next(lines[which])
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
