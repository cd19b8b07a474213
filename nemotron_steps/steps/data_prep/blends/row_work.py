"""What becomes of one row. Each preparation has a RowWork of its own; it is sent to worker processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from nemotron_steps.rows.lines import Row

RowFunction = Callable[[str, Row], Sequence[Row] | None]
"""(`file:line`, row) → rows to write in its place, or None: the row as it is, byte for byte.

DataError refuses the row, RowLeftOut leaves it out."""


class RowLeftOut(Exception):
    """Raised by a row function for a row that can be used and is not wanted. Its text is the reason."""


class RowWork(Protocol):
    """Settings of a preparation that can be pickled, and the function they make."""

    def function(self) -> RowFunction:
        """Called once in every process."""
        ...
