"""The rows of a part of a file, one at a time, as lines: a row that is not changed stays as it is byte for byte."""

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import IO, Any

import msgspec

from nemotron_steps.errors import DataError, StepsError, UnsupportedError, show_line
from nemotron_steps.rows.layouts import without_padding
from nemotron_steps.rows.lines import LONGEST_LINE, Row
from nemotron_steps.steps.data_prep.blends.sources import DataFile, is_missing, unreachable

PART_BYTES = 32 << 20
"""Bytes of a JSON Lines file that one worker reads at a time."""
_BATCH = 256

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class Part:
    """A part of a file."""

    file: DataFile
    start: int
    end: int
    size: int


def parts_of(file: DataFile) -> list[Part]:
    """The parts of a file. A compressed one can only be read as a whole."""
    if file.kind == "parquet":
        with _opened(file) as opened, columnar_errors(file):
            groups = _pyarrow().parquet.ParquetFile(opened).metadata
            sizes = [groups.row_group(i).total_byte_size for i in range(groups.num_row_groups)]
        share = file.size / max(sum(sizes), 1)
        return [Part(file, i, i + 1, round(size * share)) for i, size in enumerate(sizes)]
    if file.kind in ("gzip", "arrow", "csv", "list"):
        return [Part(file, 0, file.size, file.size)]
    starts = range(0, max(file.size, 1), PART_BYTES)
    ends = [min(start + PART_BYTES, file.size) for start in starts]
    return [Part(file, start, end, end - start) for start, end in zip(starts, ends, strict=True)]


def lines_of(part: Part) -> Iterator[tuple[int, bytes]]:
    """(number within the part, from 1; text) of every line, blank ones too. Rows of columnar files are made lines."""
    file = part.file
    readers = {"parquet": _columnar_lines, "arrow": _columnar_lines, "csv": _table_lines, "list": _table_lines}
    with _opened(file) as opened:
        try:
            yield from enumerate(readers.get(file.kind, _text_lines)(part, opened), start=1)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(
                "the compressed file is damaged or cut off",
                where=file.place,
                found=str(error),
                hints=(f"gzip -t {file.path}",),
            ) from error


def _text_lines(part: Part, file: IO[bytes]) -> Iterator[bytes]:
    position = part.start
    if position:
        # The line that begins before the part is the part's before.
        file.seek(position - 1)
        position += len(file.readline(LONGEST_LINE + 1)) - 1
    while part.file.kind == "gzip" or position < part.end:
        line = file.readline(LONGEST_LINE + 1)
        if not line:
            break
        if len(line) > LONGEST_LINE:
            raise DataError(
                "the line is too long for a row",
                where=f"{part.file.place}, byte {position}",
                expected=f"at most {LONGEST_LINE >> 20} MiB a line, one JSON object each",
                hints=(f"head -c {position + 200} {part.file.path} | tail -c 200   # where the line begins",),
            )
        position += len(line)
        yield line


def _columnar_lines(part: Part, file: IO[bytes]) -> Iterator[bytes]:
    with columnar_errors(part.file):
        pyarrow = _pyarrow()
        if part.file.kind == "parquet":
            groups = range(part.start, part.end)
            batches = pyarrow.parquet.ParquetFile(file).iter_batches(_BATCH, row_groups=groups)
        else:
            batches = pyarrow.ipc.open_stream(file)
        for batch in batches:
            for start in range(0, batch.num_rows, _BATCH):
                for row in batch.slice(start, _BATCH).to_pylist():
                    yield _encode(without_padding(row)) + b"\n"


def _table_lines(part: Part, file: IO[bytes]) -> Iterator[bytes]:
    """Rows of a table as text, every value a text; or of a list in one JSON document, which is read whole."""
    path = part.file.place
    try:
        if part.file.kind == "list":
            for row in json.loads(file.read()):
                yield json.dumps(row).encode() + b"\n"
            return
        csv.field_size_limit(LONGEST_LINE)
        text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
        reader = csv.DictReader(text, delimiter="\t" if path.endswith(".tsv") else ",", strict=True)
        for row in reader:
            if None in row or None in row.values():
                raise DataError(
                    "the line has another number of columns than the header",
                    where=f"{path}:{reader.line_num}",
                    expected=f"{len(reader.fieldnames or ())} columns",
                    hints=show_line(f"{path}:{reader.line_num}"),
                )
            yield _encode(row) + b"\n"
    except (csv.Error, UnicodeDecodeError, json.JSONDecodeError) as error:
        kind = "table" if part.file.kind == "csv" else "list"
        raise DataError(
            f"the {kind} cannot be read",
            where=path,
            found=str(error),
            hints=(f"head -n 3 {path}   # what it begins with",),
        ) from error


@contextmanager
def columnar_errors(file: DataFile) -> Iterator[None]:
    """Turn what pyarrow says of a damaged file into a DataError."""
    arrow_error = _pyarrow().ArrowException
    try:
        yield
    except arrow_error as error:
        raise DataError(
            f"the {file.kind.capitalize()} file is damaged, or of another format",
            where=file.place,
            found=(str(error).splitlines() or [type(error).__name__])[0],
            hints=(f"ls -l {file.path}   # whether it was copied whole",),
        ) from error


def _pyarrow() -> Any:
    try:
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise UnsupportedError(
            "Parquet files, and folders that `datasets` saved, need pyarrow",
            hints=("pip install 'nemotron-steps[data]'",),
        ) from error
    return pyarrow


def to_line(row: Row, strict: bool) -> bytes:
    """A changed row as a line. `strict` as `parse_row` returned it: other rows have values that JSON has not."""
    return (_encode(row) if strict else json.dumps(row).encode()) + b"\n"


@contextmanager
def _opened(file: DataFile) -> Iterator[IO[bytes]]:
    with ExitStack() as stack:
        if "://" in file.path:
            opened: Any = stack.enter_context(_remote(file))
            if file.kind == "jsonl":  # fsspec's readline takes no limit
                opened = stack.enter_context(io.BufferedReader(opened, 1 << 20))
        else:
            opened = stack.enter_context(open(file.path, "rb", buffering=1 << 20))
        yield stack.enter_context(gzip.open(opened, "rb")) if file.kind == "gzip" else opened


@contextmanager
def _remote(file: DataFile) -> Iterator[Any]:
    import fsspec

    try:
        with fsspec.open(file.path, "rb") as opened:
            yield opened
    except (StepsError, EOFError, zlib.error, gzip.BadGzipFile):
        raise
    except Exception as error:  # every file system has errors of its own
        if is_missing(error):
            raise DataError(
                "the file is gone",
                where=file.place,
                hints=("run the same command again: it looks for the files that are there now",),
            ) from error
        raise unreachable(file.path, "", error) from error
