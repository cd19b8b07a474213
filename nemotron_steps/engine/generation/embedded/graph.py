"""Decoding on CUDA: one whole step, from the newest tokens to the next ones, as one CUDA graph.

A decoding step of a small model is hundreds of kernels of a few microseconds, and launching them from Python takes
longer than running them. Shapes are fixed by rounding the number of rows up; where the step writes, and how far each
row reads, is found on the device (kernels.py). Graphs are captured when a size first occurs.

Not for: batches that sample with top-p, top-k or mixed temperatures, which are decoded operator by operator.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from nemotron_steps.engine.generation.embedded.base import CachedModel, DeviceView
from nemotron_steps.engine.generation.embedded.batch import DecodeBatch
from nemotron_steps.engine.generation.embedded.prefix import Prefix
from nemotron_steps.engine.generation.embedded.sampling import SamplingPlan, sample, stream_uniforms

_SMALLEST = 8
_TEMPERATURES = 4  # training, evaluation, and two more: requests from outside may name any, and graphs take memory
MATRIX_ROWS = 16
"""Queries that a matrix unit takes at once."""
PREFIX_FIELDS = 5
"""int64s a row of the prefix table: addresses of its shared prefix's keys and values, tokens, layer and head stride."""


def padded_rows(rows: int, most: int) -> int:
    """The number of rows a graph is captured for: 8, 12, 16, 24, 32, 48, …, and `most`."""
    size = _SMALLEST
    while size < rows:
        half_again = size + size // 2
        size = half_again if half_again >= rows else 2 * size
    return min(size, most)


class GraphDecoder:
    """Steps a DecodeBatch.

    Args:
        capture: False runs the same operators one by one, on any device.
    """

    def __init__(self, model: CachedModel, batch: DecodeBatch, *, capture: bool = True) -> None:
        self._model = model
        self._batch = batch
        self._capture = capture
        self._column = torch.zeros(1, dtype=torch.int64, device=model.device)
        self._prefixes = torch.zeros((batch.max_rows, PREFIX_FIELDS), dtype=torch.int64, device=model.device)
        self._together = rows_together(model.queries_per_lane)
        self._sharing = torch.zeros(1 + batch.max_rows * self._together, dtype=torch.int64, device=model.device)
        self._arrangement = -1
        self._allocation = batch.allocation
        self._graphs: dict[tuple[int, float], torch.cuda.CUDAGraph] = {}
        self._temperatures: set[float] = set()
        self._pool = _new_pool(capture)

    @staticmethod
    def fits(model: CachedModel) -> bool:
        """Whether the kernels run here: a CUDA device, and heads whose size is a power of two."""
        dim = model.architecture.head_dim
        return model.device.type == "cuda" and dim >= 16 and dim & (dim - 1) == 0

    def takes(self, plan: SamplingPlan) -> bool:
        """Whether every row samples alike, from the whole distribution, at one of the first few temperatures asked."""
        if plan.top_p is not None or isinstance(plan.temperature, torch.Tensor):
            return False
        if len(self._temperatures) < _TEMPERATURES:
            self._temperatures.add(plan.temperature)
        return plan.temperature in self._temperatures

    def step(self, plan: SamplingPlan) -> None:
        """Feed the tokens of the current column and sample those of the next, to which the batch moves."""
        batch = self._batch
        assert not isinstance(plan.temperature, torch.Tensor)
        rows = padded_rows(batch.size, batch.max_rows)
        self._refer_to_prefixes()
        self._column.fill_(batch.column)
        if batch.states is not None:
            batch.states.place.fill_(batch.states.newest)
        if self._allocation != batch.allocation:  # graphs hold the addresses of the tensors they were captured with
            self._allocation = batch.allocation
            self._graphs.clear()
            self._pool = _new_pool(self._capture)  # torch ends a pool with the last graph in it
        key = (rows, plan.temperature)
        if key in self._graphs:
            self._graphs[key].replay()
        else:
            self._run(rows, plan)  # this step, which also compiles whatever the capture needs
            if self._capture:
                graph = torch.cuda.CUDAGraph()
                # Another thread may be training on this device meanwhile.
                with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                    self._run(rows, plan)
                self._graphs[key] = graph
        batch.column += 1
        if batch.states is not None:
            batch.states.advance()

    def _run(self, rows: int, plan: SamplingPlan) -> None:
        batch, column = self._batch, self._column
        tokens = batch.tokens[:rows].index_select(1, column).squeeze(1)
        view = DeviceView(
            batch.keys, batch.values, column, batch.row_state, self._prefixes, self._sharing, batch.states
        )
        logits = self._model.decode_fused(tokens, view).float()
        chosen = self._model.take_chosen()
        if chosen is not None:
            batch.routed_experts[:rows].index_copy_(1, column, chosen.unsqueeze(1))
        column.add_(1)
        uniforms = stream_uniforms(batch.streams[:rows], column - batch.answers[:rows], 1).squeeze(1)
        sampled, logprobs = sample(logits, uniforms, plan)
        batch.tokens[:rows].index_copy_(1, column, sampled.unsqueeze(1))
        batch.logprobs[:rows].index_copy_(1, column, logprobs.unsqueeze(1))

    def _refer_to_prefixes(self) -> None:
        """Where each row's shared prefix lies; its tensors are held by the batch."""
        batch = self._batch
        if self._arrangement == batch.arrangement:
            return
        self._arrangement = batch.arrangement
        table = torch.zeros(self._prefixes.shape, dtype=torch.int64)
        rows_of: dict[Prefix, list[int]] = {}
        for row, prefix in enumerate(batch.row_prefixes):
            if prefix is not None:
                rows_of.setdefault(prefix, []).append(row)
        for prefix, rows in rows_of.items():
            keys, values = prefix.keys, prefix.values
            assert keys.stride() == values.stride() and keys.stride(2) == keys.shape[3] and keys.stride(3) == 1
            fields = keys.data_ptr(), values.data_ptr(), len(prefix.tokens), keys.stride(0), keys.stride(1)
            table[rows] = torch.tensor(fields)
        self._prefixes.copy_(table)
        sets = sets_of_rows(rows_of.values(), self._together)
        self._sharing[: 1 + sets.numel()] = F.pad(sets.flatten(), (1, 0), value=len(sets)).to(self._sharing.device)


def rows_together(queries: int) -> int:
    """Rows of one prefix that are looked up together: as many as have MATRIX_ROWS queries of a key-value head."""
    return max(1, MATRIX_ROWS // queries)


def sets_of_rows(sharing: Iterable[Sequence[int]], most: int) -> torch.Tensor:
    """Rows that share a prefix, at most `most` of them together: int64 [sets, most], filled up with -1."""
    sets = [rows[i : i + most] for rows in sharing for i in range(0, len(rows), most)]
    return torch.tensor([[*rows, *[-1] * (most - len(rows))] for rows in sets], dtype=torch.int64).view(-1, most)


def _new_pool(capture: bool) -> Any:
    """A handle of memory that graphs share; None where nothing is captured."""
    return torch.cuda.graph_pool_handle() if capture else None
