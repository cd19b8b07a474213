"""The rows of a part of a file, one at a time, as lines: a row that is not changed stays as it is byte for byte.

Nothing here holds more than one row, or one batch of a columnar file.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

import msgspec

from nemotron_steps.artifacts.rows import LONGEST_LINE, Row
from nemotron_steps.errors import DataError
from nemotron_steps.steps.data_prep.blends.sources import DataFile

PART_BYTES = 32 << 20
"""Bytes of a JSON Lines file that one worker reads at a time."""

_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class Part:
    """A part of a file: the lines that begin in the bytes [start, end)."""

    file: DataFile
    start: int
    end: int


def parts_of(file: DataFile) -> list[Part]:
    """The parts of a file. A compressed one can only be read as a whole."""
    if file.kind == "gzip":
        return [Part(file, 0, file.size)]
    return [Part(file, start, min(start + PART_BYTES, file.size)) for start in range(0, max(file.size, 1), PART_BYTES)]


def lines_of(part: Part) -> Iterator[tuple[int, bytes]]:
    """(line number within the part, from 1; text) of every line, blank ones too.

    Raises:
        DataError: a line is longer than any row, or a compressed file is damaged.
    """
    where = part.file.path
    try:
        with _opened(part.file) as file:
            position = part.start
            if position:
                # The line that begins before the part is the part's before.
                file.seek(position - 1)
                position += len(file.readline(LONGEST_LINE + 1)) - 1
            number = 0
            while part.file.kind == "gzip" or position < part.end:
                line = file.readline(LONGEST_LINE + 1)
                if not line:
                    break
                number += 1
                position += len(line)
                if len(line) > LONGEST_LINE:
                    raise DataError(
                        "the line is too long for a row",
                        where=f"{where}, byte {position - len(line)}",
                        expected=f"at most {LONGEST_LINE >> 20} MiB a line, one JSON object each",
                    )
                yield number, line
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            "the compressed file is damaged or cut off", where=where, found=str(error), hints=(f"gzip -t {where}",)
        ) from error


def parse(line: bytes, where: str) -> tuple[Row, bool]:
    """(row, whether it is strict JSON). The same rows are accepted as by Python's json, which takes NaN for a number.

    Raises:
        DataError: the line is not a JSON object; it tells a last line that was cut off.
    """
    try:
        row, strict = _decode(line), True
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        row, strict = _parse_leniently(line, where), False
    if not isinstance(row, dict):
        raise DataError("the row is not a JSON object", where=where, expected="an object", found=_excerpt(line))
    return row, strict


def to_line(row: Row, strict: bool) -> bytes:
    """A changed row as a line. `strict` as `parse` returned it: other rows have values that JSON has not."""
    return (_encode(row) if strict else json.dumps(row).encode()) + b"\n"


def _parse_leniently(line: bytes, where: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        cut_off = not line.endswith(b"\n")
        raise DataError(
            "the last line is cut off: the file is truncated" if cut_off else "the line is not JSON",
            where=where,
            expected="one complete JSON object a line",
            found=f"{_excerpt(line)} ({error.msg if isinstance(error, json.JSONDecodeError) else error})",
        ) from error


def _excerpt(line: bytes) -> str:
    text = line.decode("utf-8", errors="replace").strip()
    return text if len(text) <= 60 else text[:28] + " … " + text[-28:]


@contextmanager
def _opened(file: DataFile) -> Iterator[IO[bytes]]:
    if file.kind == "gzip":
        with gzip.open(file.path, "rb") as unpacked:
            yield unpacked  # type: ignore[misc]
    else:
        with open(file.path, "rb", buffering=1 << 20) as plain:
            yield plain
