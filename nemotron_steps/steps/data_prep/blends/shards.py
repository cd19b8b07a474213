"""One part of a file to one shard: the usable rows, the refused ones by name and reason, and the accounts.

A shard is there when its accounts are: they are written last, by a rename. A part whose file changed is read again.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

from nemotron_steps.artifacts.files import storage_errors, to_json_bytes, write_atomic
from nemotron_steps.errors import DataError
from nemotron_steps.rows.lines import parse_row
from nemotron_steps.steps.data_prep.blends.accounts import Accounts
from nemotron_steps.steps.data_prep.blends.formats import Part, lines_of, to_line
from nemotron_steps.steps.data_prep.blends.row_work import RowFunction, RowLeftOut

_FORMAT = 1


@dataclass(frozen=True)
class ShardTask:
    """A part, and what of it is taken.

    Attributes:
        name: of the shard's files.
        folder: where they are put.
        part: what is read.
        limit: rows at most.
        share: of the rows, drawn from their place; 1 for all.
        seed: of the draw.
    """

    name: str
    folder: str
    part: Part
    limit: int | None
    share: float
    seed: str


@dataclass(frozen=True)
class Shard:
    """A finished shard.

    Attributes:
        task: what it was made of.
        lines: lines of the part, blank ones too: the parts after it count on.
        accounts: of the part. `written` are the shard's rows.
        first_refusal: as the row function raised it, with the line's number within the part.
    """

    task: ShardTask
    lines: int
    accounts: Accounts
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
    """Read the part, write the shard and commit it.

    Raises:
        DataError: the part cannot be read. StorageError: the shard cannot be written.
    """
    with storage_errors(task.folder):
        shard = _write(task, function)
        refusal = shard.first_refusal
        receipt = {
            "format": _FORMAT,
            "of": _identity(task),
            "lines": shard.lines,
            "accounts": shard.accounts.to_dict(),
            "refusal": refusal.__dict__ if refusal is not None else None,
        }
        write_atomic(_receipt(task), to_json_bytes(receipt))
    return shard


def finished(task: ShardTask) -> Shard | None:
    """The shard that an earlier attempt made of the same part, None if it made none."""
    try:
        receipt = json.loads(_receipt(task).read_bytes())
        refusal, shard_of = receipt["refusal"], receipt["of"]
        if receipt["format"] != _FORMAT or shard_of != _identity(task):
            return None
        error = DataError(refusal["what"], hints=refusal["hints"]) if refusal is not None else None
        if error is not None:
            error.__dict__.update(refusal, hints=error.hints)
        shard = Shard(task, receipt["lines"], Accounts.from_dict(receipt["accounts"]), error)
    except FileNotFoundError:
        return None
    return shard if shard.rows.is_file() else None


def _write(task: ShardTask, function: RowFunction) -> Shard:
    accounts, number, first = Accounts(), 0, None
    path = task.part.file.place
    shard = Shard(task, 0, accounts, None)
    with ExitStack() as stack:
        out = stack.enter_context(shard.rows.open("wb", buffering=1 << 20))
        refused: BinaryIO | None = None
        for number, line in lines_of(task.part):
            if line.isspace():
                continue
            if accounts.read == task.limit:
                break
            accounts.read += 1
            if task.share < 1 and _place(task, number) >= task.share:
                accounts.leave_out("the weight of the data set is below 1")
                continue
            where = f"{path}:{number}"
            try:
                row, strict = parse_row(line, where)
                made = function(where, row)
            except DataError as error:
                first = first or error
                accounts.refuse(error.what)
                if refused is None:
                    refused = stack.enter_context(shard.refusals.open("wb"))
                refused.write(json.dumps(refusal_record(error, task.part.file.name, number, where)).encode() + b"\n")
                continue
            except RowLeftOut as reason:
                accounts.leave_out(str(reason))
                continue
            if made is None:
                out.write(line if line.endswith(b"\n") else line + b"\n")
                accounts.written += 1
            else:
                out.writelines(to_line(each, strict) for each in made)
                accounts.written += len(made)
                accounts.added += len(made) - 1
        out.flush()
        os.fsync(out.fileno())  # before the receipt says that the rows are there
    if first is None:
        shard.refusals.unlink(missing_ok=True)
    return Shard(task, number, accounts, first)


def _place(task: ShardTask, number: int) -> float:
    """A number in [0, 1) that follows from the row's place alone."""
    text = f"{task.seed}:{task.part.file.name}:{task.part.start}:{number}"
    return int.from_bytes(blake2b(text.encode(), digest_size=7).digest()) / (1 << 56)


def refusal_record(error: DataError, file: str, line: int, where: str) -> dict[str, Any]:
    """A refused row as it is told in the file of refusals."""
    field = re.sub(r"^ field ", "", error.where.removeprefix(where)) if error.where and error.where != where else None
    return {"file": file, "line": line, "reason": error.what, "field": field or None, "found": error.found}


def _identity(task: ShardTask) -> dict[str, Any]:
    file = task.part.file
    return {
        "file": file.place,
        "stamp": file.stamp,
        "start": task.part.start,
        "end": task.part.end,
        "limit": task.limit,
        "share": task.share,
    }


def _receipt(task: ShardTask) -> Path:
    return Path(task.folder) / f"{task.name}.json"
