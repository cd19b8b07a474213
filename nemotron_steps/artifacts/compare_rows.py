"""What changed between two JSON Lines files: rows added, removed and changed, whatever their order."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_SHOWN = 3
"""Examples of each kind."""
_IDS = ("id", "uuid", "task_id", "instance_id")
"""Keys that name a row."""


@dataclass(frozen=True)
class RowExample:
    """One row that differs. Lines count from 1, None where the row is only in the other file.

    `keys` are those whose values differ, of a changed row; `text` is the row's beginning, of any other.
    """

    kind: str
    line_a: int | None
    line_b: int | None
    keys: tuple[str, ...] = ()
    text: str = ""


@dataclass
class RowChanges:
    """Rows of two files. Two rows are the same if they hold the same values; of the same row an id, else its line, says
    that it changed."""

    same: int = 0
    added: int = 0
    removed: int = 0
    changed: int = 0
    examples: list[RowExample] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """JSON-serialisable form."""
        return asdict(self)


def compare_rows(a: Path, b: Path) -> RowChanges:
    """What changed from `a` to `b`. Holds a digest of each row, and the rows that differ one at a time."""
    rows_a, rows_b = list(_digests(a)), list(_digests(b))
    common = Counter(rows_a) & Counter(rows_b)
    left_a, left_b = _left(rows_a, common), _left(rows_b, common)
    changes = RowChanges(same=common.total())
    theirs = {_name(row, line): line for line, row in _read(b, left_b)}
    taken: set[int] = set()
    pairs: dict[int, int] = {}
    for line, row in _read(a, left_a):
        match = theirs.get(_name(row, line))
        if match is None or match in taken:
            changes.removed += 1
            _show(changes, RowExample("removed", line, None, text=_text(row)))
        else:
            taken.add(match)
            changes.changed += 1
            if changes.changed <= _SHOWN:
                pairs[line] = match
    after = dict(_read(b, set(pairs.values())))
    for line, row in _read(a, set(pairs)):
        _show(changes, RowExample("changed", line, pairs[line], keys=_differing(row, after[pairs[line]])))
    for line, row in _read(b, left_b - taken):
        changes.added += 1
        _show(changes, RowExample("added", None, line, text=_text(row)))
    return changes


def _digests(path: Path) -> Iterator[bytes]:
    """16 bytes for each row, the same for the same values. Blank lines are rows of nothing."""
    with path.open("rb") as file:
        for raw in file:
            row = _parsed(raw)
            text = raw if isinstance(row, bytes) else json.dumps(row, sort_keys=True).encode()
            yield hashlib.blake2b(text, digest_size=16).digest()


def _left(rows: list[bytes], common: Counter[bytes]) -> set[int]:
    """Numbers of the lines that the other file has no row for."""
    still = common.copy()
    left = set()
    for line, digest in enumerate(rows, start=1):
        if still[digest] > 0:
            still[digest] -= 1
        else:
            left.add(line)
    return left


def _read(path: Path, lines: set[int]) -> Iterator[tuple[int, Any]]:
    if not lines:
        return
    with path.open("rb") as file:
        for line, raw in enumerate(file, start=1):
            if line in lines:
                yield line, _parsed(raw)


def _parsed(raw: bytes) -> Any:
    """A row's values; the bytes of one that is no JSON."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return raw.rstrip(b"\n")


def _name(row: Any, line: int) -> tuple[str, Any]:
    found = next((key for key in _IDS if isinstance(row, dict) and isinstance(row.get(key), str | int)), None)
    return ("line", line) if found is None else (found, row[found])


def _differing(a: Any, b: Any) -> tuple[str, ...]:
    if not isinstance(a, dict) or not isinstance(b, dict):
        return ()
    return tuple(key for key in {**a, **b} if key not in a or key not in b or a[key] != b[key])


def _show(changes: RowChanges, example: RowExample) -> None:
    if sum(each.kind == example.kind for each in changes.examples) < _SHOWN:
        changes.examples.append(example)


def _text(row: Any) -> str:
    text = row.decode("utf-8", "replace") if isinstance(row, bytes) else json.dumps(row, ensure_ascii=False)
    return text if len(text) <= 120 else f"{text[:119]}…"
