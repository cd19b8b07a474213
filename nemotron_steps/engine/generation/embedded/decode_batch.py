"""The tensors of the sequences being decoded: KV cache, tokens, logprobs and random numbers, aligned by column.

Every sequence ends at the same column: t tokens of it occupy columns [column - t + 1, column], and padding lies on the
left, behind an additive mask. A row may leave the beginning of its prompt to a `Prefix` that it shares with other rows.
Live rows are rows [0, size): removing rows moves the last ones into the holes. When the last column is reached,
everything shifts left, or there come to be more columns: most answers are far shorter than the longest one allowed.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F

from nemotron_steps.engine.generation.embedded.cached_model import CachedModel, CacheView, RowStates
from nemotron_steps.engine.generation.embedded.prefix_cache import Prefix, PrefixGrid
from nemotron_steps.engine.generation.embedded.sampling import stream_uniforms
from nemotron_steps.engine.memory_tuning import release_gpu_memory

_UNIFORM_BLOCK = 32
_FIRST_COLUMNS = {"cpu": 64, "cuda": 512}
"""Most that there are at first. Widening holds one and a half caches for a moment, and ends CUDA graphs."""


@dataclass(frozen=True)
class NewRow:
    """A sequence that joins the batch: its whole prompt, the beginning that other rows read too, the key of its random
    stream, and where its stop set begins in the table that `stopped` reads."""

    prompt: Prefix
    shared: Prefix | None
    stream: int
    stop_offset: int

    @property
    def own_length(self) -> int:
        """Prompt tokens that the row holds itself."""
        return len(self.prompt.tokens) - (0 if self.shared is None else len(self.shared.tokens))


class DecodeBatch:
    """At most `max_rows` sequences of at most `max_length` tokens; `size` rows are in use.

    `column` is that of every row's newest token, which has been sampled but not fed. There are `columns`; with their
    number the tensors are replaced, and `allocation` changes: tokens int64 and logprobs float32 [max_rows, columns],
    routed_experts int16 [max_rows, columns, mixtures, k], keys and values [cached layers, max_rows, key-value heads,
    columns, D]. row_state, int64 [max_rows, 5], has the first column that the row holds itself (past the end for rows
    not in use), that of its position 0, that of its first sampled token, `streams` and the stop offset; row_prefixes
    what each row reads before that. `arrangement` changes with these.
    """

    def __init__(self, model: CachedModel, max_rows: int, max_length: int) -> None:
        self._model = model
        self._device = model.device
        self._max_length = max_length
        self._masked = model.masked
        self._lanes = model.architecture.num_key_value_heads
        self.max_rows = max_rows
        self._most_columns = max_length + max(64, max_length // 8)  # enough to shift seldom, whatever joins when
        self._longest_row = 0  # most columns that a row in use can come to hold
        self.row_state = torch.zeros((max_rows, 5), device=self._device, dtype=torch.int64)
        self._starts, self._origins, self.answers, self.streams, self._stop_offsets = self.row_state.unbind(1)
        self._grid = PrefixGrid(model)
        self._grid_arrangement = 0
        self.row_prefixes: list[Prefix | None] = []
        self.arrangement = 0
        self._uniforms: torch.Tensor | None = None
        self._uniforms_column = 0
        self.size = self.column = self._first = self.allocation = self.columns = 0
        self.keys = self.values = torch.empty(0)
        self.states: RowStates | None = None
        self.tokens = torch.empty((max_rows, 0), device=self._device, dtype=torch.int64)
        self.logprobs = torch.empty((max_rows, 0), device=self._device, dtype=torch.float32)
        a = model.architecture
        routes = (len(a.mixtures), a.experts_per_token) if model.chosen is not None else (0, 0)
        self.routed_experts = torch.empty((max_rows, 0, *routes), device=self._device, dtype=torch.int16)
        self._columns_before = 0  # when the cache was given back
        if self._device.type == "cpu":
            self._allocate(min(_FIRST_COLUMNS["cpu"], self._most_columns))

    @property
    def prefixes(self) -> dict[Prefix, int]:
        """Shared prefixes in use and how many rows read each."""
        return Counter(prefix for prefix in self.row_prefixes if prefix is not None)

    def _allocate(self, columns: int) -> None:
        """Have `columns` columns; what the present ones hold stays where it is."""
        if not self.size:
            self.keys = self.values = torch.empty(0)  # nothing to keep: freed before there is more
        if self._device.type == "cuda":
            release_gpu_memory()  # the narrow cache's memory is of a size that nothing else asks for
        self.keys = self._with_columns(columns, self.keys)
        if self._device.type == "cuda":
            release_gpu_memory()  # so that never more than one and a half caches exist
        self.values = self._with_columns(columns, self.values)
        if self.states is None:
            self.states = self._model.new_row_states(self.max_rows)
        more = (0, columns - self.columns)
        self.tokens, self.logprobs = F.pad(self.tokens, more), F.pad(self.logprobs, more)
        self.routed_experts = F.pad(self.routed_experts, (0, 0, 0, 0, *more))
        self._bias = torch.zeros((self.max_rows, self._lanes, columns), device=self._device, dtype=torch.float32)
        self._column_index = torch.arange(columns, device=self._device)
        self.columns = columns
        self._starts[self.size :] = columns
        self._mask_rows(0, self.size)
        self.allocation += 1
        if self._device.type == "cuda":
            release_gpu_memory()  # the narrow cache's memory is of a size that nothing else asks for

    @property
    def cache_bytes(self) -> int:
        """Of keys, values and states."""
        return self.keys.nbytes + self.values.nbytes + (0 if self.states is None else self.states.bytes)

    def free(self) -> None:
        """Give the cache's memory back, between two batches. The next ones allocate as many columns at once."""
        assert not self.size, "rows are being decoded"
        self._columns_before = self.columns
        self.keys = self.values = torch.empty(0, device=self._device)
        self.states = None
        self.columns = 0
        self.tokens, self.logprobs = self.tokens[:, :0].clone(), self.logprobs[:, :0].clone()
        self.routed_experts = self.routed_experts[:, :0].clone()
        self._bias = self._bias[..., :0].clone()
        self.column = self._first = 0
        self.allocation += 1

    def _with_columns(self, columns: int, cache: torch.Tensor) -> torch.Tensor:
        wide = self._model.new_cache(self.max_rows, columns)
        if self.size:
            used = slice(self._first, self.column + 1)
            wide[:, : self.size, :, used] = cache[:, : self.size, :, used]
        return wide

    def make_room(self, longest: int, *, most: int = 0) -> int:
        """Shift or widen so that `longest` tokens fit left of the current column and one more step fits right of it;
        returns by how many columns everything moved. `most`: columns that a joining row can come to hold."""
        self._longest_row = max(most, self._longest_row if self.size else 0)
        if self.size == 0:
            if longest + 1 >= self.columns:
                at_first = min(self._longest_row + 2, _FIRST_COLUMNS[self._device.type], self._most_columns)
                self._allocate(max(self._next_columns(longest), at_first, self._columns_before))
            self.column = self._first = longest
            return 0
        if self.column >= longest and self.column + 1 < self.columns:
            return 0
        span = max(longest, self.column - self._first)
        if self.columns < self._most_columns and self.columns - 1 - span < max(1, span // 8):
            self._allocate(self._next_columns(span))
            if self.column >= longest and self.column + 1 < self.columns:
                return 0
        shift = span - self.column
        old, new = slice(self._first, self.column + 1), slice(self._first + shift, self.column + 1 + shift)
        for cache in (*self.keys.unbind(0), *self.values.unbind(0)):
            cache[: self.size, :, new] = cache[: self.size, :, old].clone()
        for row_data in (self.tokens, self.logprobs, self.routed_experts):
            row_data[: self.size, new] = row_data[: self.size, old].clone()
        self.row_state[: self.size, :3] += shift
        self.column += shift
        self._first += shift
        self._uniforms = None
        self._mask_rows(0, self.size)
        return shift

    def _next_columns(self, span: int) -> int:
        """Half as many again, yet no more than rows that began together need, unless they have used those up."""
        enough = self._longest_row + 2
        target = min(3 * self.columns // 2, enough) if self.columns < enough else self._most_columns
        return min(max(target, span + 2), self._most_columns)

    def add(self, rows: Sequence[NewRow]) -> None:
        """Append rows, whose prompts end left of the current column; room must have been made."""
        state, row = [], self.size
        for _, same in groupby(rows, key=lambda new: (new.prompt, new.shared)):
            alike = list(same)
            new, end = alike[0], row + len(alike)
            length = len(new.prompt.tokens)
            start, known = self.column - new.own_length, length - new.own_length
            if new.own_length:
                self.keys[:, row:end, :, start : self.column] = new.prompt.keys[:, None, :, known:]
                self.values[:, row:end, :, start : self.column] = new.prompt.values[:, None, :, known:]
            if self.states is not None and new.prompt.states is not None:
                self.states.put(row, end, new.prompt.states)
            state += [(start, self.column - length, self.column, r.stream, r.stop_offset) for r in alike]
            self.row_prefixes += [new.shared] * len(alike)
            row = end
        first, self.size = self.size, self.size + len(rows)
        self.row_state[first : self.size] = torch.tensor(state, device=self._device)
        self._first = min(self._first, *(start for start, *_ in state))
        self._uniforms = None
        self._mask_rows(first, self.size)
        self.arrangement += 1

    def refill(self, sequences: Sequence[Prefix], shared: dict[Prefix, Prefix]) -> None:
        """Replace the cache and states of every row, after the weights have changed: `sequences`, one a row, of all its
        tokens that have been fed, and what to read in place of each shared prefix."""
        for row, sequence in enumerate(sequences):
            known = self.row_prefixes[row]
            begin = 0 if known is None else len(known.tokens)
            start = self.column - (len(sequence.tokens) - begin)
            if start < self.column:
                self.keys[:, row, :, start : self.column] = sequence.keys[:, :, begin:]
                self.values[:, row, :, start : self.column] = sequence.values[:, :, begin:]
            if self.states is not None and sequence.states is not None:
                self.states.put(row, row + 1, sequence.states)
        self.row_prefixes = [None if prefix is None else shared[prefix] for prefix in self.row_prefixes]
        self.arrangement += 1

    def _mask_rows(self, first: int, last: int) -> None:
        hidden = self._column_index < self._starts[first:last, None]
        self._bias[first:last] = (hidden * self._masked).unsqueeze(1)

    def decode_view(self) -> CacheView:
        """The cache of all rows, for feeding the tokens of the current column."""
        if self._grid_arrangement != self.arrangement:
            self._grid_arrangement = self.arrangement
            self._grid.arrange(self.row_prefixes)
        bias = self._bias[: self.size, :, None, self._first : self.column + 1].flatten(0, 1)
        return CacheView(self.keys, self.values, self._first, self.column, bias, self._grid.view, self.states)

    def newest(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens of the current column and their positions, int64 [size]."""
        # Rows that have ended stay until they are removed, and would run past the last position.
        positions = (self.column - self._origins[: self.size]).clamp_(max=self._max_length - 1)
        return self.tokens[: self.size, self.column], positions

    def uniforms(self, first: int = 0) -> torch.Tensor:
        """float64 [size - first]: the random number of each row for sampling the token of the current column."""
        offset = self.column - self._uniforms_column
        if self._uniforms is None or offset >= _UNIFORM_BLOCK:
            self._uniforms_column, offset = self.column, 0
            drawn = self.column - self.answers[: self.size]
            self._uniforms = stream_uniforms(self.streams[: self.size], drawn, _UNIFORM_BLOCK)
        return self._uniforms[first:, offset]

    def stopped(self, tokens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """bool [size]: which tokens are stop tokens of their row, by the flat table of stop sets."""
        return table.index_select(0, tokens + self._stop_offsets[: self.size])

    def remove(self, dead: Sequence[int]) -> list[tuple[int, int]]:
        """Drop rows and close the holes. Returns the moves made: (from, to) row numbers."""
        size = self.size - len(dead)
        gone = set(dead)
        holes = [r for r in dead if r < size]
        tails = [r for r in range(size, self.size) if r not in gone]
        window = slice(self._first, self.column + 1)
        moves = list(zip(tails, holes, strict=True))
        for tail, hole in moves:
            for cache in (self.keys, self.values):
                cache[:, hole, :, window] = cache[:, tail, :, window]
            self.row_prefixes[hole] = self.row_prefixes[tail]
        if moves:
            if self.states is not None:
                self.states.move(tails, holes)
            source, target = torch.tensor(tails, device=self._device), torch.tensor(holes, device=self._device)
            sampled = (self.tokens[:, window], self.logprobs[:, window], self.routed_experts[:, window])
            for data in (*sampled, self.row_state, self._bias):
                data[target] = data[source]
        del self.row_prefixes[size:]
        self._starts[size : self.size] = self.columns
        self.size = size
        self._uniforms = None
        if size:
            self._first = int(self._starts[:size].min())
        self.arrangement += 1
        return moves
