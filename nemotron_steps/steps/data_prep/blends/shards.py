"""Parts of files to shards, over processes: the usable rows, the refused ones by name and reason, and where every row
went. A shard is there when its receipt is, and is then not made again unless its file changed."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, TextIO

from nemotron_steps.artifacts.files import storage_errors, to_json_bytes, write_atomic
from nemotron_steps.engine.workers.workers import end_with_parent
from nemotron_steps.errors import DataError, WorkerLostError
from nemotron_steps.rows.lines import Row, parse_row
from nemotron_steps.steps.data_prep.blends import formats
from nemotron_steps.steps.data_prep.blends.formats import Part, lines_of, to_line

_FORMAT = 2


@dataclass
class RowCounts:
    """Rows of a part of a file, of a data set, or of all. `left_out`: usable and not wanted. `added`: several made of
    one, or repeated. `unused`: between those of `rows.train` and the held-out ones."""

    read: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    added: int = 0
    unused: int = 0
    written: int = 0

    def add(self, other: RowCounts) -> None:
        """Add the counts of another part."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def balance(self) -> int:
        """Rows that went nowhere: 0, or there is an error in the program."""
        return self.read + self.added - self.written - self.refused.total() - self.left_out.total() - self.unused

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "read": self.read,
            "added": self.added,
            "written": self.written,
            "refused": self.refused.total(),
            "left_out": self.left_out.total(),
            "unused": self.unused,
            "refused_by_reason": dict(self.refused.most_common()),
            "left_out_by_reason": dict(self.left_out.most_common()),
        }


RowFunction = Callable[[str, Row], Sequence[Row] | None]
"""(`file:line`, row) → rows to write in its place, or None: the row as it is, byte for byte.

DataError refuses the row, RowLeftOut leaves it out."""


class RowLeftOut(Exception):
    """Raised by a row function for a row that can be used and is not wanted. Its text is the reason."""


RowWork = Callable[[], RowFunction]
"""Makes a preparation's row function, once in every process: can be pickled, such as a `partial` with its settings."""


@dataclass(frozen=True)
class ShardTask:
    """A part, and what of it is taken."""

    name: str
    folder: str
    part: Part
    limit: int | None
    share: float
    seed: str

    def path(self, kind: str) -> Path:
        """A file of the shard: its `rows`, the `refused` ones as JSON lines, or the receipt (`json`)."""
        return Path(self.folder) / f"{self.name}.{kind}"

    @property
    def identity(self) -> dict[str, Any]:
        """What an earlier attempt must have made its shard of."""
        part = {"file": self.part.file.place, "stamp": self.part.file.stamp, "start": self.part.start}
        return {"format": _FORMAT, **part, "end": self.part.end, "limit": self.limit, "share": self.share}


@dataclass(frozen=True)
class Shard:
    """A finished shard; `first_refusal` has the line number within the part, as `lines` of the parts before count."""

    task: ShardTask
    lines: int
    row_counts: RowCounts
    first_refusal: DataError | None


def make_shard(task: ShardTask, function: RowFunction) -> Shard:
    """Read the part, write the shard and commit it."""
    with storage_errors(task.folder):
        shard = _write(task, function)
        refusal = None if shard.first_refusal is None else shard.first_refusal.__dict__
        receipt = {"of": task.identity, "lines": shard.lines, "counts": vars(shard.row_counts), "refusal": refusal}
        write_atomic(task.path("json"), to_json_bytes(receipt))
    return shard


def finished(task: ShardTask) -> Shard | None:
    """The shard that an earlier attempt made of the same part, None if it made none."""
    if not task.path("json").is_file() or not task.path("rows").is_file():
        return None
    receipt = json.loads(task.path("json").read_bytes())
    if receipt.get("of") != task.identity:
        return None
    counts, told, error = receipt["counts"], receipt["refusal"], None
    counts |= {name: Counter(counts[name]) for name in ("refused", "left_out")}
    if told is not None:
        error = DataError(told["what"], hints=told["hints"])
        error.__dict__.update(told, hints=error.hints)
    return Shard(task, receipt["lines"], RowCounts(**counts), error)


def _write(task: ShardTask, function: RowFunction) -> Shard:
    counted, number, first = RowCounts(), 0, None
    path = task.part.file.place
    with ExitStack() as stack:
        out = stack.enter_context(task.path("rows").open("wb", buffering=1 << 20))
        refused: TextIO | None = None
        for number, line in lines_of(task.part):
            if line.isspace():
                continue
            if counted.read == task.limit:
                break
            counted.read += 1
            if task.share < 1 and _place(task, number) >= task.share:
                counted.left_out["the weight of the data set is below 1"] += 1
                continue
            where = f"{path}:{number}"
            try:
                row, strict = parse_row(line, where)
                made = function(where, row)
            except DataError as error:
                first = first or error
                counted.refused[error.what] += 1
                if refused is None:
                    refused = stack.enter_context(task.path("refused").open("w", encoding="utf-8"))
                field = (error.where or where).removeprefix(where).removeprefix(" field ") or None
                told = {"reason": error.what, "field": field, "found": error.found}
                refused.write(json.dumps({"file": task.part.file.name, "line": number, **told}) + "\n")
                continue
            except RowLeftOut as reason:
                counted.left_out[str(reason)] += 1
                continue
            if made is None:
                out.write(line if line.endswith(b"\n") else line + b"\n")
                counted.written += 1
            else:
                out.writelines(to_line(each, strict) for each in made)
                counted.written += len(made)
                counted.added += len(made) - 1
        out.flush()
        os.fsync(out.fileno())  # before the receipt says that the rows are there
    return Shard(task, number, counted, first)


def _place(task: ShardTask, number: int) -> float:
    text = f"{task.seed}:{task.part.file.name}:{task.part.start}:{number}"
    return int.from_bytes(blake2b(text.encode(), digest_size=7).digest()) / (1 << 56)


Done = Callable[[Shard], None]
"""Called with every shard, in any order, also those that an earlier attempt made."""


def make_shards(tasks: Sequence[ShardTask], work: RowWork, num_workers: int, done: Done) -> list[Shard]:
    """The shard of every task, in the order of the tasks."""
    shards: dict[str, Shard] = {}
    for task in tasks:
        earlier = finished(task)
        if earlier is not None:
            shards[task.name] = earlier
            done(earlier)
    missing = [task for task in tasks if task.name not in shards]
    # A process takes seconds to start: each must have something to do.
    worth = -(-8 * sum(task.part.size for task in missing) // formats.PART_BYTES)
    workers = min(num_workers, len(missing), worth)
    made: Iterable[Shard] = ()
    if workers > 1:
        made = _pooled(missing, work, workers)
    elif missing:
        function = work()
        made = (make_shard(task, function) for task in missing)
    for shard in made:
        shards[shard.task.name] = shard
        done(shard)
    return [shards[task.name] for task in tasks]


def make_sample(tasks: Sequence[ShardTask], rows: int, work: RowWork, done: Done) -> list[Shard]:
    """Shards of the first `rows` rows of the tasks, one after the other."""
    shards: list[Shard] = []
    once = cache(work)
    for task in tasks:
        shards += make_shards([replace(task, limit=rows)], once, 1, done)
        rows -= shards[-1].row_counts.read
        if rows == 0:
            break
    return shards


def _pooled(tasks: Sequence[ShardTask], work: RowWork, num_workers: int) -> Iterator[Shard]:
    # Not forked: threads of this process may hold locks.
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num_workers, spawn, initializer=_begin, initargs=(work, os.getpid()))
    try:
        yield from pool.map(_make, tasks)
    except BrokenProcessPool as error:
        raise WorkerLostError(
            "a worker process of the data preparation died",
            found=str(error),
            hints=("run the same command again: finished shards are kept", "num_workers=1"),
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_function: RowFunction | None = None


def _begin(work: RowWork, parent: int) -> None:
    global _function
    end_with_parent()
    if os.getppid() != parent:  # killed while this process was starting
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is told, and ends this process
    _function = work()


def _make(task: ShardTask) -> Shard:
    assert _function is not None  # _begin ran
    return make_shard(task, _function)
