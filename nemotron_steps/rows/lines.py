"""JSON Lines: every row of a file with its line, and the error of a malformed line."""

import json
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from nemotron_steps.errors import DataError, show_line, without_line

Row = dict[str, Any]
LONGEST_LINE = 32 << 20
"""Bytes of a line: a row of a million tokens has about five million."""
RowCheck = Callable[[Row, str], object]

_decode = msgspec.json.Decoder().decode


def read_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """Yield (line number from 1, row) of a JSON Lines file. Blank lines are skipped."""
    with path.open("rb") as file:
        # Bounded, so that a file of another kind is told before it is in memory.
        for number, raw in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), b""), start=1):
            if not raw.strip():
                continue
            row, _ = parse_row(raw, f"{path}:{number}")
            yield number, row


def parse_row(line: bytes, where: str) -> tuple[Row, bool]:
    """(row, whether it is strict JSON). The same lines are rows as for Python's json, which takes NaN for a number."""
    if len(line) > LONGEST_LINE:
        raise DataError(
            "the line is too long for a row",
            where=where,
            expected=f"at most {LONGEST_LINE >> 20} MiB a line, one JSON object each",
            found=f"more, beginning with {_excerpt(line[:60])}",
            hints=(f"head -c 200 {shlex.quote(where.rpartition(':')[0])}   # how the file begins",),
        )
    strict = True
    try:
        row = _decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        strict = False
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            cut_off = not line.endswith(b"\n")
            raise DataError(
                "the last line is cut off: the file is truncated" if cut_off else "the line is not JSON",
                where=where,
                expected="one complete JSON object a line",
                found=f"{_excerpt(line)} ({error.msg if isinstance(error, json.JSONDecodeError) else error})",
                hints=(*without_line(where), *show_line(where)),
            ) from error
    if not isinstance(row, dict):
        raise DataError(
            "the row is not a JSON object",
            where=where,
            expected="an object",
            found=_excerpt(line),
            hints=show_line(where),
        )
    return row, strict


def check_file(path: Path, check: RowCheck) -> int:
    """Check every row of one file and return how many there are. DataError names the first bad row."""
    count = 0
    for number, row in read_rows(path):
        check(row, f"{path}:{number}")
        count += 1
    return count


def shown_fields(row: Mapping[str, Any]) -> str:
    """What a row has, for errors: the names of its first fields."""
    return "fields " + (", ".join(name[:40] for name in sorted(row)[:12]) or "none")


def agent_name(row: Row) -> str | None:
    """The agent (environment) an RL prompt names, if any."""
    reference = row.get("agent_ref")
    return reference.get("name") if isinstance(reference, dict) else None


def _excerpt(line: bytes) -> str:
    text = line.decode("utf-8", errors="replace").strip()
    return text if len(text) <= 60 else text[:28] + " … " + text[-28:]
