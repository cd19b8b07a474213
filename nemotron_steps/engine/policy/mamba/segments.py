"""Where sequences begin among flat tokens, which continue others, and how a scan cuts them into chunks.

Computed on CPU, once for all layers; no length is ever read back from a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

if TYPE_CHECKING:
    from nemotron_steps.engine.policy.token_layout import TokenLayout

Ints = npt.NDArray[np.int64]


@dataclass
class Segment:
    """Consecutive chunks that are computed together. K chunks, m rows that have a part in it."""

    tokens: slice
    count: int
    pad: Tensor | None  # int64 [K · width], token of each cell; None without padding
    unpad: Tensor | None  # int64 [tokens], cell of each token
    filled: Tensor | None  # float32 [K, width, 1]: 1 in cells that are tokens
    rows: slice  # the first may have begun earlier, the last end later
    goes_on: bool  # the last row ends in a later segment
    row: Tensor  # int64 [K], row of each chunk, counted from the first
    first: Tensor  # int64 [m], each row's first chunk here
    last: Tensor  # int64 [m], its last


@dataclass
class Gaps:
    """Rows with a gap of `taps` cells before each, for what precedes its first token. All int64."""

    source: Tensor  # [cells], flat token of each; anything where a gap is empty
    cells: Tensor  # [tokens], cell of each
    prompt_cells: Tensor  # cells of gaps that hold tokens of a prompt
    prompt: Tensor  # and which
    empty_cells: Tensor  # cells of gaps that hold nothing, or a given window
    window: Tensor  # and what of it
    last: Tensor  # [rows, taps], cells of the last tokens, the newest last


@dataclass
class Batches:
    """Rows of a level side by side, padded on the right, in batches of rows of like lengths."""

    shapes: list[tuple[int, int]]  # rows and width of each batch
    pad: Tensor  # int64 [cells], token of each
    unpad: Tensor  # int64 [tokens], cell of each
    filled: Tensor  # float32 [cells, 1]: 1 in cells that are tokens
    rows: Tensor  # int64, one batch after the other
    places: Tensor  # int64, where among those each row is


@dataclass
class Level:
    """All runs that begin empty, or all that continue those."""

    lengths: Ints
    tokens: slice

    @property
    def rows(self) -> int:
        """How many."""
        return len(self.lengths)

    def segments(self, width: int, most: int, device: torch.device) -> list[Segment]:
        """Chunks of at most `width` tokens, none of two rows, at most `most` of them in a segment."""
        chunks_of_row = -(-self.lengths // width)
        row = np.repeat(np.arange(self.rows), chunks_of_row)
        within = np.arange(len(row)) - np.repeat(np.cumsum(chunks_of_row) - chunks_of_row, chunks_of_row)
        sizes = np.minimum(self.lengths[row] - within * width, width)
        starts = np.cumsum(sizes) - sizes
        parts = [slice(begin, min(begin + most, len(row))) for begin in range(0, len(row), most)]
        return [self._segment(row, sizes, starts, part, width, device) for part in parts]

    def batches(self, device: torch.device) -> Batches:
        """Fewer than half of the cells of a batch of more than one row are padding."""
        kind = np.ceil(np.log2(self.lengths)).astype(np.int64)
        rows = np.argsort(kind, kind="stable")
        shapes = [(int((kind == k).sum()), int(self.lengths[kind == k].max())) for k in np.unique(kind)]
        width = np.repeat([width for _, width in shapes], [count for count, _ in shapes])
        own, begin = self.lengths[rows], (np.cumsum(self.lengths) - self.lengths)[rows]
        column = np.arange(int(width.sum())) - np.repeat(np.cumsum(width) - width, width)
        real = column < np.repeat(own, width)
        pad = np.repeat(begin, width) + np.minimum(column, np.repeat(own, width) - 1)
        unpad = np.empty(int(own.sum()), np.int64)
        unpad[pad[real]] = np.flatnonzero(real)
        arrays = pad, unpad, real.astype(np.float32)[:, None], rows, np.argsort(rows)
        return Batches(shapes, *(_moved(array, device) for array in arrays))

    def _segment(
        self, row: Ints, sizes: Ints, starts: Ints, chunks: slice, width: int, device: torch.device
    ) -> Segment:
        own, begin, count = sizes[chunks], int(starts[chunks.start]), chunks.stop - chunks.start
        pad = unpad = filled = None
        if (own < width).any():
            columns = np.arange(width)
            real = columns < own[:, None]
            pad = ((starts[chunks] - begin)[:, None] + np.minimum(columns, own[:, None] - 1)).ravel()
            unpad, filled = np.flatnonzero(real), real.astype(np.float32)[:, :, None]
        first_row, last_row = int(row[chunks.start]), int(row[chunks.stop - 1])
        counted = np.bincount(row[chunks] - first_row, minlength=1)
        last = np.cumsum(counted) - 1

        return Segment(
            tokens=slice(begin, begin + int(own.sum())),
            count=count,
            pad=_moved(pad, device),
            unpad=_moved(unpad, device),
            filled=_moved(filled, device),
            rows=slice(first_row, last_row + 1),
            goes_on=chunks.stop < len(row) and int(row[chunks.stop]) == last_row,
            row=_moved(row[chunks] - first_row, device),
            first=_moved(last - counted + 1, device),
            last=_moved(last, device),
        )


def _moved(array: npt.NDArray[Any] | None, device: torch.device) -> Any:
    return None if array is None else torch.from_numpy(array).to(device, non_blocking=True)


class Runs:
    """Sequences in flat tokens: those that begin empty first, then those with `parents`."""

    def __init__(
        self,
        lengths: Sequence[int] | Ints,
        parents: Sequence[int] | Ints = (),
        *,
        padding: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.parents = np.asarray(parents, dtype=np.int64)
        self.padding = padding
        self.device = torch.device(device)
        self.roots = len(self.lengths) - len(self.parents)
        assert self.lengths.min(initial=1) > 0, "every run has a token"
        self.tokens = int(self.lengths.sum())
        self._segments: dict[tuple[int, int], list[list[Segment]]] = {}
        self._gaps: dict[int, Gaps] = {}

    @cached_property
    def levels(self) -> list[Level]:
        """Rows that begin empty, and those that continue them, if any."""
        split = int(self.lengths[: self.roots].sum())
        first = Level(self.lengths[: self.roots], slice(0, split))
        return [first, Level(self.lengths[self.roots :], slice(split, self.tokens))] if len(self.parents) else [first]

    @cached_property
    def parent(self) -> Tensor:
        """int64 [rows − roots] on the device."""
        return _moved(self.parents, self.device)

    @cached_property
    def row_of_token(self) -> list[Tensor]:
        """Of each level, int32 [1, tokens] on the device."""
        rows = [np.repeat(np.arange(level.rows, dtype=np.int32), level.lengths)[None] for level in self.levels]
        return [_moved(row, self.device) for row in rows]

    @cached_property
    def batches(self) -> list[Batches]:
        """Of each level."""
        return [level.batches(self.device) for level in self.levels]

    def segments(self, width: int, most: int) -> list[list[Segment]]:
        """Of each level."""
        if (width, most) not in self._segments:
            self._segments[width, most] = [level.segments(width, most, self.device) for level in self.levels]
        return self._segments[width, most]

    def gaps(self, taps: int) -> Gaps:
        """Room for what precedes each row."""
        if taps in self._gaps:
            return self._gaps[taps]
        rows = len(self.lengths)
        ends = np.cumsum(self.lengths)
        # What the gap of each row holds: flat tokens, or −1 − (cell of the first rows' windows).
        sources = -1 - np.arange(rows * taps).reshape(rows, taps)
        for row, parent in enumerate(self.parents.tolist(), self.roots):
            own = min(taps, int(self.lengths[parent]))
            sources[row, taps - own :] = np.arange(ends[parent] - own, ends[parent])
            sources[row, : taps - own] = sources[parent, own:]
        cells = np.arange(self.tokens) + np.repeat(np.arange(1, rows + 1) * taps, self.lengths)
        gap_cells = ((ends - self.lengths)[:, None] + np.arange(rows)[:, None] * taps + np.arange(taps)).ravel()
        last = (ends + np.arange(1, rows + 1) * taps)[:, None] - taps + np.arange(taps)
        flat = sources.ravel()
        whole = np.zeros(self.tokens + rows * taps, np.int64)
        whole[cells], whole[gap_cells] = np.arange(self.tokens), np.maximum(flat, 0)
        arrays = whole, cells, gap_cells[flat >= 0], flat[flat >= 0], gap_cells[flat < 0], -1 - flat[flat < 0], last
        gaps = Gaps(*(_moved(array, self.device) for array in arrays))
        self._gaps[taps] = gaps
        return gaps


def runs_of(layout: TokenLayout) -> Runs:
    """The runs of a micro-batch, computed once for all its layers."""
    if layout.runs is None:
        layout.runs = Runs(
            layout.spans.lengths.numpy(),
            np.repeat(np.arange(layout.whole.rows), np.diff(layout.spans.first_suffix.numpy())),
            padding=layout.padding,
            device=layout.token_ids.device,
        )
    return layout.runs
