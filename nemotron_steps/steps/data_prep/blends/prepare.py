"""A whole preparation: sources to split files, every row accounted for, in memory that no source's size changes. A
preparation that was killed goes on with the shards that are missing."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemotron_steps.artifacts.files import remove_tree, storage_errors, to_json_bytes, write_atomic
from nemotron_steps.config.schema.data_prep import DataPrepConfig, JsonlSource
from nemotron_steps.errors import DataError, show_line
from nemotron_steps.runs.context import StepContext, Tracker
from nemotron_steps.steps.data_prep.blends.blend_file import read_blend
from nemotron_steps.steps.data_prep.blends.formats import parts_of
from nemotron_steps.steps.data_prep.blends.shards import RowCounts, RowWork, Shard, ShardTask, make_sample, make_shards
from nemotron_steps.steps.data_prep.blends.sources import DataFile, data_files, hub_name, licence_of, without_signature
from nemotron_steps.steps.data_prep.blends.splits import FILES, DataSet, Split, write_split_files

ACCOUNTING = "accounting.json"
REFUSALS = "refusals.ndjson"
FEW = 0.5
"""Share of unusable rows up to which leaving them out is offered: above, it is the file that is not what was meant."""


@dataclass(frozen=True)
class Source:
    """A data set to be read."""

    name: str
    files: Sequence[DataFile]
    weight: float = 1.0
    split: Split | None = None
    licence: str = ""


def sources_of(config: DataPrepConfig) -> list[Source]:
    """The sources that a config names."""
    if config.blend_path is not None:
        return [
            Source(
                entry.name if split is None else f"{split}/{entry.name}",
                data_files(
                    entry.path,
                    key=f"{config.blend_path}, data set {entry.name}",
                    split=entry.split,
                    subset=entry.subset,
                    mirror=config.mirror,
                ),
                entry.weight,
                split,
                licence_of(entry.path, config.mirror),
            )
            for split, entries in read_blend(config.blend_path).items()
            for entry in entries
        ]
    if config.input_path is not None:
        name = without_signature(config.input_path).rstrip("/").rpartition("/")[2]
        files = data_files(config.input_path, key="input_path", mirror=config.mirror)
        return [Source(name, files, licence=licence_of(config.input_path, config.mirror))]
    assert config.jsonl is not None  # the config has exactly one source
    return [jsonl_source(config.jsonl)]


def check(config: DataPrepConfig, inputs: Mapping[str, Any]) -> None:
    """The preflight of preparations. DataError where a path that the config names leads nowhere on this machine."""
    places: list[tuple[str | None, str, str | None]] = [(config.input_path, "input_path", None)]
    if config.blend_path is not None:
        for entries in read_blend(config.blend_path).values():
            places += [(each.path, f"{config.blend_path}, data set {each.name}", each.split) for each in entries]
    for path, key, split in places:
        if path is not None and "://" not in path and (hub_name(path) is None or Path(path).exists()):
            data_files(path, key=key, split=split)


def jsonl_source(jsonl: JsonlSource) -> Source:
    """The user's own JSON Lines. DataError without any."""
    return Source("jsonl", data_files(jsonl.path, key="jsonl.path"), licence=licence_of(jsonl.path))


def prepare(
    context: StepContext[Any],
    sources: Sequence[Source],
    work: RowWork,
    folder: Path,
    files: Mapping[Split, str] = FILES,
    *,
    preparation: Any = None,
) -> dict[str, int]:
    """Write the split files and the accounting, and record the sources' licences. Returns split → rows."""
    for slot in context.outputs.values() if any(source.licence for source in sources) else ():
        slot.attributes["license"] = ", ".join(dict.fromkeys(source.licence or "not recorded" for source in sources))
    preparation, tracker = preparation or context.config, context.tracker
    staging = context.work / "shards"
    staging.mkdir(parents=True, exist_ok=True)
    data_sets = _shards(sources, work, preparation, staging, tracker)
    everything = RowCounts()
    by_source = {}
    for each in data_sets:
        counted = RowCounts()
        for shard in each.shards:
            counted.add(shard.row_counts)
        everything.add(counted)
        by_source[each.name] = counted.to_dict()
    refused, total = everything.refused.total(), everything.read - everything.left_out.total()
    if refused:
        with storage_errors(folder):
            _write_refusals(data_sets, folder / REFUSALS)
        tracker.event("rows_refused", count=refused, file=str(folder / REFUSALS))
    if refused > preparation.max_refused_share * total:
        raise _too_many(data_sets, refused, total, preparation.max_refused_share)
    sizes, rows = preparation.rows, sum(each.rows for each in data_sets)
    if preparation.sample is not None and rows <= sizes.validation + sizes.heldout:
        tenth = rows // 10
        sizes = sizes.model_copy(
            update={"validation": min(sizes.validation, tenth), "heldout": min(sizes.heldout, tenth)}
        )
    counts = write_split_files(data_sets, {split: folder / name for split, name in files.items()}, sizes, everything)
    assert everything.balance() == 0  # no row is lost
    record: dict[str, Any] = {**everything.to_dict(), "splits": counts, "sources": by_source}
    write_atomic(folder / ACCOUNTING, to_json_bytes(record))
    told = {
        "rows_read": everything.read,
        "rows_refused": refused,
        "rows_left_out": everything.left_out.total(),
        "rows_added": everything.added,
        "rows_unused": everything.unused,
    }
    tracker.summary({name: count for name, count in told.items() if count or name == "rows_read"})
    remove_tree(staging)
    return counts


def _shards(
    sources: Sequence[Source], work: RowWork, preparation: Any, staging: Path, tracker: Tracker
) -> list[DataSet]:
    tasks = [
        [
            ShardTask(f"{number:03}-{place:06}", str(staging), part, None, min(source.weight, 1.0), source.name)
            for place, part in enumerate(part for file in source.files for part in parts_of(file))
        ]
        for number, source in enumerate(sources)
    ]
    total, read = sum(task.part.size for each in tasks for task in each), 0

    def done(shard: Shard) -> None:
        nonlocal read
        read += shard.task.part.size
        tracker.progress("preparing rows", read, total)

    if preparation.sample is not None:
        shards = [make_sample(each, preparation.sample, work, done) for each in tasks]
    else:
        num_workers = preparation.num_workers or len(os.sched_getaffinity(0))
        made = iter(make_shards([task for each in tasks for task in each], work, num_workers, done))
        shards = [[next(made) for _ in each] for each in tasks]
    return [
        DataSet(source.name, made, source.weight, source.split) for source, made in zip(sources, shards, strict=True)
    ]


def _write_refusals(data_sets: Sequence[DataSet], path: Path) -> None:
    with path.open("w", encoding="utf-8") as out:
        for name, shard, offset in _in_order(data_sets):
            if shard.first_refusal is None:
                continue
            for line in shard.task.path("refused").read_text(encoding="utf-8").splitlines():
                record = json.loads(line)
                record = {"source": name, **record, "line": record["line"] + offset}
                out.write(json.dumps(record, ensure_ascii=False) + "\n")


def _in_order(data_sets: Sequence[DataSet]) -> Iterator[tuple[str, Shard, int]]:
    """(data set, shard, lines of its file before it) of every shard."""
    for each in data_sets:
        file, lines = None, 0
        for shard in each.shards:
            if shard.task.part.file != file:
                file, lines = shard.task.part.file, 0
            yield each.name, shard, lines
            lines += shard.lines


def _too_many(data_sets: Sequence[DataSet], refused: int, total: int, max_refused_share: float) -> DataError:
    """The error of the first refusal of all, its line counted from the beginning of the file."""
    error, shard, offset = next((s.first_refusal, s, n) for _, s, n in _in_order(data_sets) if s.first_refusal)
    path = shard.task.part.file.place
    number = int((error.where or "").removeprefix(f"{path}:").split(" ")[0])
    here, there = f"{path}:{number}", f"{path}:{number + offset}"
    hints = [h for hint in error.hints for h in (show_line(there) if hint in show_line(here) else (hint,))]
    share = refused / total
    percent = 100 * refused // total + 1  # above the share, which no rounding then falls below
    tolerated = (f"max_refused_share={percent / 100:.2f}",) if share <= FEW else ()
    return DataError(
        f"{refused} of {total} rows cannot be used; the first: {error.what}",
        where=there + (error.where or "").removeprefix(here),
        expected=error.expected if max_refused_share == 0 else f"at most {max_refused_share:.1%} unusable rows",
        found=error.found if max_refused_share == 0 else f"{share:.1%}",
        hints=(*tolerated, *hints),
    )
