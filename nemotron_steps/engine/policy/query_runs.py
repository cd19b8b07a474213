"""Where the queries in some ranges of a micro-batch's flat tokens belong, and which keys they see.

A run of queries of one sequence sees its prompt, where that is shared, and its own sequence up to each of them: the
first lacks, of the keys that the last sees, as many as there are queries after it. That is a causal mask aligned at its
end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

Range = tuple[int, int]
"""(first, after the last)"""
Row = tuple[tuple[Range, ...], Range]
"""(its prompt, if that is shared; its own tokens) of a sequence"""


@dataclass(frozen=True)
class Run:
    """Consecutive queries of one sequence, and the ranges of flat tokens that the last of them sees."""

    queries: Range
    keys: tuple[Range, ...]


class QueryRuns:
    """The queries in some ranges of the flat tokens, row by row.

    Args:
        rows: in the order of the flat tokens.
        ranges: ascending.
        device: of the tensors.
    """

    def __init__(self, rows: Sequence[Row], ranges: Iterable[Range], device: torch.device) -> None:
        self.runs = list(_runs(rows, ranges))
        self._device = device

    @cached_property
    def keys(self) -> torch.Tensor:
        """int64: the keys that each run sees, one run after another."""
        ranges = [torch.arange(*keys) for run in self.runs for keys in run.keys]
        return torch.cat(ranges).to(self._device)

    @cached_property
    def starts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """int32 [runs + 1] each, where a run's queries begin and where its keys do."""
        counts = torch.tensor([(0, 0), *zip(self._queries, self._keys, strict=True)], dtype=torch.int32)
        queries, keys = counts.cumsum(0, dtype=torch.int32).to(self._device).unbind(1)
        return queries.contiguous(), keys.contiguous()

    @cached_property
    def longest(self) -> tuple[int, int]:
        """Most queries and most keys of a run."""
        return max(self._queries), max(self._keys)

    @property
    def _queries(self) -> list[int]:
        return [size(run.queries) for run in self.runs]

    @property
    def _keys(self) -> list[int]:
        return [sum(map(size, run.keys)) for run in self.runs]


def size(of: Range) -> int:
    """How many there are in a range."""
    return of[1] - of[0]


def _runs(rows: Sequence[Row], ranges: Iterable[Range]) -> Iterator[Run]:
    for first, after in ranges:
        for prompt, (start, end) in rows:
            queries = max(first, start), min(after, end)
            if queries[0] < queries[1]:
                yield Run(queries, (*prompt, (start, queries[1])))
