"""Arranges rows that share prefixes into a grid, so that each prefix is read once a step and not once a row.

Attention over a shared prefix is one matrix product of all its rows' queries with its keys. Products of one batch must
have one shape, so prefixes get equally many cells; a prefix with more rows than cells takes several grid rows.

Not for: attention itself (dense_model.py, hybrid_model.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from nemotron_steps.engine.generation.embedded.cached_model import CachedModel, PrefixView
from nemotron_steps.engine.generation.embedded.prefix_cache import Prefix

_ROW_COST = 3  # a grid row costs about as much as this many cells: its keys and values are read once
MATRIX_ROWS = 16
"""Queries that a matrix unit takes at once."""
PREFIX_FIELDS = 5
"""int64s a row of the prefix table: addresses of its shared prefix's keys and values, tokens, layer and head stride."""


def cells_per_row(counts: Sequence[int]) -> int:
    """The grid width that wastes least for prefixes read by `counts` rows each."""
    widths = {*counts, *(1 << i for i in range(max(counts).bit_length()))}

    def cost(width: int) -> int:
        return sum(-(-count // width) for count in counts) * (width + _ROW_COST)

    return min(sorted(widths, reverse=True), key=cost)


class PrefixGrid:
    """The grid of the current rows.

    Attributes:
        view: what the model reads, None when no row has a prefix.
    """

    def __init__(self, model: CachedModel) -> None:
        self._model = model
        self._stacked: list[Prefix | None] = []
        self.view: PrefixView | None = None

    def arrange(self, prefixes: Sequence[Prefix | None]) -> None:
        """Lay out rows 0, 1, … that read `prefixes`."""
        rows_of: dict[Prefix | None, list[int]] = {}
        for row, prefix in enumerate(prefixes):
            rows_of.setdefault(prefix, []).append(row)
        without = rows_of.pop(None, [])
        if not rows_of:
            self.view, self._stacked = None, []
            return
        width = cells_per_row([len(rows) for rows in rows_of.values()])
        stacked: list[Prefix | None] = []
        grid: list[list[int]] = []
        place = np.zeros((len(prefixes), 2), dtype=np.int64)
        for prefix, rows in rows_of.items():
            for begin in range(0, len(rows), width):
                cells = rows[begin : begin + width]
                place[cells, 0], place[cells, 1] = len(grid), range(len(cells))
                stacked.append(prefix)
                grid.append(cells + [0] * (width - len(cells)))
        if without:  # rows that hold their whole prompt themselves read a prefix that is masked everywhere
            place[without, 0] = len(grid)
            stacked.append(None)
            grid.append([0] * width)
        self._index(np.array(grid, dtype=np.int64), place, stacked)

    def _index(self, grid: np.ndarray, place: np.ndarray, stacked: list[Prefix | None]) -> None:
        model = self._model
        lanes, queries = model.architecture.num_key_value_heads, model.queries_per_lane
        # Cells in the order prefix, key-value head, row of the prefix, query head.
        lane = grid[:, None, :, None] * lanes + np.arange(lanes)[:, None, None]
        query = np.arange(queries)
        row_of_cell = lane * queries + query
        query_of_cell = lane * (queries + 1) + query
        cell = (place[:, 0, None] * lanes + np.arange(lanes)) * grid.shape[1] + place[:, 1, None]
        cell_of_row = cell[:, :, None] * queries + query
        if self.view is None or self._stacked != stacked:
            self._stacked = stacked
            keys, values, bias = self._stack(stacked)
        else:
            keys, values, bias = self.view.keys, self.view.values, self.view.bias
        query_index, row_index, cell_index = (
            torch.from_numpy(index.reshape(-1)).to(model.device) for index in (query_of_cell, row_of_cell, cell_of_row)
        )
        self.view = PrefixView(keys, values, bias, query_index, row_index, cell_index)

    def _stack(self, stacked: list[Prefix | None]) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
        model = self._model
        longest = max(len(prefix.tokens) for prefix in stacked if prefix is not None)
        keys, values = model.new_cache(len(stacked), longest), model.new_cache(len(stacked), longest)
        bias = torch.full(
            (len(stacked), keys.shape[2], 1, longest), model.masked, device=model.device, dtype=torch.float32
        )
        for place, prefix in enumerate(stacked):
            if prefix is not None:
                begin = longest - len(prefix.tokens)
                keys[:, place, :, begin:] = prefix.keys
                values[:, place, :, begin:] = prefix.values
                bias[place, :, :, begin:] = 0
        return (
            list(keys.flatten(1, 2).transpose(2, 3).unbind(0)),
            list(values.flatten(1, 2).unbind(0)),
            bias.flatten(0, 1),
        )


def address(prefix: Prefix) -> tuple[int, int, int, int, int]:
    """A row of the prefix table."""
    keys, values = prefix.keys, prefix.values
    assert keys.stride() == values.stride() and keys.stride(2) == keys.shape[3] and keys.stride(3) == 1
    return keys.data_ptr(), values.data_ptr(), len(prefix.tokens), keys.stride(0), keys.stride(1)


def rows_together(queries: int) -> int:
    """Rows of one prefix that are looked up together: as many as have MATRIX_ROWS queries of a key-value head."""
    return max(1, MATRIX_ROWS // queries)


def sets_of_rows(sharing: Iterable[Sequence[int]], most: int) -> torch.Tensor:
    """Rows that share a prefix, at most `most` of them together: int64 [sets, most], filled up with -1."""
    sets = [rows[i : i + most] for rows in sharing for i in range(0, len(rows), most)]
    return torch.tensor([[*rows, *[-1] * (most - len(rows))] for rows in sets], dtype=torch.int64).view(-1, most)
