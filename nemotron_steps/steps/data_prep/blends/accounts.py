"""Where every row went: rows read + added = rows written + refused + left out + unused."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

_DISTINCT = 100
_OTHER = "other reasons"


@dataclass
class Accounts:
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

    def refuse(self, reason: str) -> None:
        """Count a refusal. Reasons are sentences; a source with very many different ones has the rest in one."""
        _count(self.refused, reason, 1)

    def leave_out(self, reason: str) -> None:
        """Count a row that is not wanted."""
        _count(self.left_out, reason, 1)

    def add(self, other: Accounts) -> None:
        """Add the counts of another part."""
        self.read += other.read
        self.added += other.added
        self.unused += other.unused
        self.written += other.written
        for mine, others in ((self.refused, other.refused), (self.left_out, other.left_out)):
            for reason, count in others.items():
                _count(mine, reason, count)

    @property
    def num_refused(self) -> int:
        """Rows that cannot be used."""
        return self.refused.total()

    @property
    def num_left_out(self) -> int:
        """Rows that are not wanted."""
        return self.left_out.total()

    def balance(self) -> int:
        """Rows that went nowhere: 0, or there is an error in the program."""
        return self.read + self.added - self.written - self.num_refused - self.num_left_out - self.unused

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "read": self.read,
            "added": self.added,
            "written": self.written,
            "refused": self.num_refused,
            "left_out": self.num_left_out,
            "unused": self.unused,
            "refused_by_reason": dict(self.refused.most_common()),
            "left_out_by_reason": dict(self.left_out.most_common()),
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Accounts:
        """Read what `to_dict` wrote."""
        return cls(
            read=data["read"],
            refused=Counter(data["refused_by_reason"]),
            left_out=Counter(data["left_out_by_reason"]),
            added=data["added"],
            unused=data["unused"],
            written=data["written"],
        )


def _count(counts: Counter[str], reason: str, count: int) -> None:
    known = reason in counts or len(counts) < _DISTINCT
    counts[reason if known else _OTHER] += count
