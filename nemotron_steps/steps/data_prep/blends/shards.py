"""One part of a file to one shard: the usable rows, the refused ones by name and reason, and where every row went.

A shard is there when its receipt is: it is written last, by a rename. A part whose file changed is read again.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, TextIO

from nemotron_steps.artifacts.files import storage_errors, to_json_bytes, write_atomic
from nemotron_steps.errors import DataError
from nemotron_steps.rows.lines import Row, parse_row
from nemotron_steps.steps.data_prep.blends.formats import Part, lines_of, to_line

_DISTINCT = 100
_OTHER = "other reasons"


@dataclass
class RowCounts:
    """Counts of one part of a file, of a data set, or of everything.

    Attributes:
        read: rows of the sources that were looked at.
        refused: rows that cannot be used, by reason.
        left_out: rows that could be used and are not wanted, by reason.
        added: rows beyond one for each that was kept: several made of one, or repeated by a weight above 1.
        unused: usable rows between those of `rows.train` and the held-out ones.
        written: rows of the split files.
    """

    read: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    added: int = 0
    unused: int = 0
    written: int = 0

    def add(self, other: RowCounts) -> None:
        """Add the counts of another part."""
        for name, value in vars(other).items():
            if isinstance(value, int):
                setattr(self, name, getattr(self, name) + value)
                continue
            for reason, count in value.items():
                _count(getattr(self, name), reason, count)

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

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> RowCounts:
        """Read what `to_dict` wrote."""
        refused, left_out = (Counter(data[f"{name}_by_reason"]) for name in ("refused", "left_out"))
        return cls(data["read"], refused, left_out, data["added"], data["unused"], data["written"])


def _count(counts: Counter[str], reason: str, count: int) -> None:
    """Reasons are sentences; a source with very many different ones has the rest in one."""
    known = reason in counts or len(counts) < _DISTINCT
    counts[reason if known else _OTHER] += count


RowFunction = Callable[[str, Row], Sequence[Row] | None]
"""(`file:line`, row) → rows to write in its place, or None: the row as it is, byte for byte.

DataError refuses the row, RowLeftOut leaves it out."""


class RowLeftOut(Exception):
    """Raised by a row function for a row that can be used and is not wanted. Its text is the reason."""


RowWork = Callable[[], RowFunction]
"""Makes a preparation's row function, once in every process: can be pickled, such as a `partial` with its settings."""


_FORMAT = 1


@dataclass(frozen=True)
class ShardTask:
    """A part, and what of it is taken."""

    name: str
    folder: str
    part: Part
    limit: int | None
    share: float
    seed: str

    @property
    def receipt(self) -> Path:
        """Is there when the shard is."""
        return Path(self.folder) / f"{self.name}.json"


@dataclass(frozen=True)
class Shard:
    """A finished shard.

    Attributes:
        task: what it was made of.
        lines: lines of the part, blank ones too: the parts after it count on.
        row_counts: of the part. `written` are the shard's rows.
        first_refusal: as the row function raised it, with the line's number within the part.
    """

    task: ShardTask
    lines: int
    row_counts: RowCounts
    first_refusal: DataError | None

    @property
    def rows(self) -> Path:
        """The usable rows."""
        return Path(self.task.folder) / f"{self.task.name}.rows"

    @property
    def refusals(self) -> Path:
        """A JSON object a line for each refused row."""
        return Path(self.task.folder) / f"{self.task.name}.refused"


def make_shard(task: ShardTask, function: RowFunction) -> Shard:
    """Read the part, write the shard and commit it."""
    with storage_errors(task.folder):
        shard = _write(task, function)
        refusal = shard.first_refusal
        receipt = {
            **_identity(task),
            "lines": shard.lines,
            "accounts": shard.row_counts.to_dict(),
            "refusal": refusal.__dict__ if refusal is not None else None,
        }
        write_atomic(task.receipt, to_json_bytes(receipt))
    return shard


def finished(task: ShardTask) -> Shard | None:
    """The shard that an earlier attempt made of the same part, None if it made none."""
    if not task.receipt.is_file():
        return None
    receipt = json.loads(task.receipt.read_bytes())
    if not _identity(task).items() <= receipt.items():
        return None
    refusal, error = receipt["refusal"], None
    if refusal is not None:
        error = DataError(refusal["what"], hints=refusal["hints"])
        error.__dict__.update(refusal, hints=error.hints)
    shard = Shard(task, receipt["lines"], RowCounts.from_dict(receipt["accounts"]), error)
    return shard if shard.rows.is_file() else None


def _write(task: ShardTask, function: RowFunction) -> Shard:
    counted, number, first = RowCounts(), 0, None
    path = task.part.file.place
    shard = Shard(task, 0, counted, None)
    with ExitStack() as stack:
        out = stack.enter_context(shard.rows.open("wb", buffering=1 << 20))
        refused: TextIO | None = None
        for number, line in lines_of(task.part):
            if line.isspace():
                continue
            if counted.read == task.limit:
                break
            counted.read += 1
            if task.share < 1 and _place(task, number) >= task.share:
                _count(counted.left_out, "the weight of the data set is below 1", 1)
                continue
            where = f"{path}:{number}"
            try:
                row, strict = parse_row(line, where)
                made = function(where, row)
            except DataError as error:
                first = first or error
                _count(counted.refused, error.what, 1)
                if refused is None:
                    refused = stack.enter_context(shard.refusals.open("w", encoding="utf-8"))
                field = (error.where or where).removeprefix(where).removeprefix(" field ") or None
                told = {"reason": error.what, "field": field, "found": error.found}
                refused.write(json.dumps({"file": task.part.file.name, "line": number, **told}) + "\n")
                continue
            except RowLeftOut as reason:
                _count(counted.left_out, str(reason), 1)
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
    if first is None:
        shard.refusals.unlink(missing_ok=True)
    return Shard(task, number, counted, first)


def _place(task: ShardTask, number: int) -> float:
    """A number in [0, 1) that follows from the row's place alone."""
    text = f"{task.seed}:{task.part.file.name}:{task.part.start}:{number}"
    return int.from_bytes(blake2b(text.encode(), digest_size=7).digest()) / (1 << 56)


def _identity(task: ShardTask) -> dict[str, Any]:
    file = task.part.file
    return {
        "format": _FORMAT,
        "file": file.place,
        "stamp": file.stamp,
        "start": task.part.start,
        "end": task.part.end,
        "limit": task.limit,
        "share": task.share,
    }
