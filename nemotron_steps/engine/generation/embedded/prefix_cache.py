"""Keys and values of prompts, computed once and reused: within a group, among prompts that begin alike, over time.

Prompts are cut into blocks of 16 tokens, each named by the hash of everything up to its end. What enough prompts have
in common is computed first, then each is fed from there on. Keys and values can be cut anywhere; the states of a
recurrent model cannot, so there a prompt goes on only from where another one ends.

Shapes: L layers, h key-value heads, D head size, V vocabulary.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from nemotron_steps.engine.generation.embedded.cached_model import CachedModel, Continuation, PrefixView, States

BLOCK = 16
_WORTHWHILE_TOKENS = 256  # one more forward pass costs about as much as feeding this many tokens
# Attending in two parts costs about as much as reading this many tokens more in every row.
_SHARED_TOKENS = 32
_SHARING_ROWS = 4
_ROW_COST = 3  # a grid row costs about as much as this many cells: its keys and values are read once
MATRIX_ROWS = 16
"""Queries that a matrix unit takes at once."""
PREFIX_FIELDS = 5
"""int64s a row of the prefix table: addresses of its shared prefix's keys and values, tokens, layer and head stride."""
_CHUNK_TOKENS = {"cpu": 2048, "cuda": 32_768}  # one prefill pass; on a CPU its activations stay in the cache


@dataclass(eq=False)
class Prefix:
    """The cache of the first tokens of one or more sequences: keys and values [L, h, len(tokens), D], float32 logits
    [V] of the token that follows, how often the weights had changed then, the block key where it is whole blocks,
    states after its last token. One cut from a longer one has only tokens, keys and values."""

    tokens: tuple[int, ...]
    keys: torch.Tensor
    values: torch.Tensor
    logits: torch.Tensor | None
    epoch: int
    key: int | None = None
    states: States | None = None
    routed_experts: npt.NDArray[np.int16] | None = None

    def cut(self, blocks: int, key: int) -> Prefix:
        """The first `blocks` blocks, sharing memory; for attention to read, not to be continued by a state."""
        end = blocks * BLOCK
        return Prefix(self.tokens[:end], self.keys[:, :, :end], self.values[:, :, :end], None, self.epoch, key)


def block_keys(tokens: Sequence[int], *, proper: bool = True) -> list[int]:
    """One key a block of the prompt, each naming everything up to its end. `proper`: without a block that would end the
    prompt, since its last token must be fed to sample the next."""
    keys: list[int] = []
    key = 0
    for end in range(BLOCK, len(tokens) + (0 if proper else 1), BLOCK):
        key = hash((key, *tokens[end - BLOCK : end]))
        keys.append(key)
    return keys


class PrefixCache:
    """Computes prompts and remembers them up to `max_tokens` (states counting as what takes as much memory), least
    recently used first out."""

    def __init__(self, model: CachedModel, max_tokens: int) -> None:
        self._model = model
        self._max_tokens = max_tokens
        self._entries: OrderedDict[tuple[int, ...], Prefix] = OrderedDict()
        self._index: dict[int, Prefix] = {}
        """By block key; of models without states"""
        self._ends: dict[int, list[Prefix]] = {}
        """By the key of a prefix's last whole block; of models with states"""
        self._tokens = 0
        states, a = model.new_states(1), model.architecture
        token = 2 * max(1, model.cached_layers) * a.num_key_value_heads * a.head_dim * model.dtype.itemsize
        self._state_tokens = 0 if states is None else -(-states.bytes // token)
        """How many tokens' keys and values take as much memory as the states of one sequence"""
        self._epoch = 0
        self.fed_tokens = 0
        """Tokens that went through the model so far, padding not counted."""

    def clear(self) -> None:
        """Forget everything; the weights have changed."""
        self._entries.clear()
        self._index.clear()
        self._ends.clear()
        self._tokens = 0
        self._epoch += 1

    def compute(self, prompts: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], Prefix]:
        """The cache and next-token logits of each prompt."""
        done: dict[tuple[int, ...], Prefix] = {}
        missing: dict[tuple[int, ...], list[int]] = {}
        for prompt in prompts:
            entry = self._entries.get(prompt)
            if entry is None:
                missing[prompt] = block_keys(prompt)
            else:
                self._entries.move_to_end(prompt)
                done[prompt] = entry
        if not missing:
            return done
        # For each prompt the longest prefix that saves enough tokens by being computed first, unless it is known.
        counts = Counter(key for keys in missing.values() for key in keys)
        shared: set[tuple[int, ...]] = set()
        for prompt, keys in missing.items():
            worth = [b for b in range(len(keys), 0, -1) if (counts[keys[b - 1]] - 1) * b * BLOCK >= _WORTHWHILE_TOKENS]
            if worth and self._model.recurrent:
                known = self._longest_end(prompt, keys, {})[1] >= worth[0] * BLOCK
            else:
                known = not worth or keys[worth[0] - 1] in self._index
            if not known:
                shared.add(prompt[: worth[0] * BLOCK])
        # Held until the prompts are fed, however small the cache.
        held = self.compute(shared) if shared else {}
        done |= {prompt: held[prompt] for prompt in held.keys() & missing.keys()}
        missing = {prompt: keys for prompt, keys in missing.items() if prompt not in held}
        pasts = {prompt: self._longest_past(prompt, keys, held) for prompt, keys in missing.items()}
        order = sorted(missing, key=lambda p: len(p) - pasts[p][1])
        begin = 0
        while begin < len(order):
            end = begin + 1
            while end < len(order):
                longest = len(order[end]) - pasts[order[end]][1]
                if (end + 1 - begin) * longest > _CHUNK_TOKENS[self._model.device.type]:
                    break
                end += 1
            for prefix in self._feed([(p, *pasts[p]) for p in order[begin:end]]):
                done[prefix.tokens] = prefix
                self._remember(prefix)
            begin = end
        while self._tokens > self._max_tokens and self._entries:
            self._forget_oldest()
        return done

    def choose_shared(self, prompts: Sequence[Prefix], live: Iterable[Prefix]) -> list[Prefix | None]:
        """What each joining row should read together with others while it is decoded; None where nothing is worth it.
        Rows of one prompt share all of it. Otherwise a row shares the longest beginning that enough joining rows have
        in common, or that running rows share already (`live`, of any weight version)."""
        repeats, live = Counter(prompts), set(live)
        single = [p for p in repeats if repeats[p] == 1 and p not in live]
        keys = {prompt: block_keys(prompt.tokens) for prompt in single}
        counts = Counter(key for prompt_keys in keys.values() for key in prompt_keys)
        known = {prefix.key: prefix for prefix in live if prefix.key is not None and prefix.epoch == self._epoch}
        chosen: dict[Prefix, Prefix | None] = {}
        for prompt in repeats:
            chosen[prompt] = prompt if prompt not in keys and len(prompt.tokens) >= _SHARED_TOKENS else None
            for blocks, key in reversed(list(enumerate(keys.get(prompt, ()), start=1))):
                if key in known and known[key].tokens == prompt.tokens[: blocks * BLOCK]:
                    chosen[prompt] = known[key]
                    break
                if blocks * BLOCK < _SHARED_TOKENS:
                    break
                if counts[key] >= _SHARING_ROWS:
                    chosen[prompt] = known[key] = prompt.cut(blocks, key)
                    break
        return [chosen[prompt] for prompt in prompts]

    def _longest_past(
        self, prompt: tuple[int, ...], keys: list[int], held: dict[tuple[int, ...], Prefix]
    ) -> tuple[Prefix | None, int]:
        """What is known of a prompt's beginning, and how many of its tokens to use."""
        if self._model.recurrent:
            return self._longest_end(prompt, keys, held)
        for blocks in range(len(keys), 0, -1):
            length = blocks * BLOCK
            entry = held.get(prompt[:length]) or self._index.get(keys[blocks - 1])
            if entry is not None and entry.tokens[:length] == prompt[:length]:
                if entry.tokens in self._entries:
                    self._entries.move_to_end(entry.tokens)
                return entry, length
        return None, 0

    def _longest_end(
        self, prompt: tuple[int, ...], keys: list[int], held: dict[tuple[int, ...], Prefix]
    ) -> tuple[Prefix | None, int]:
        """`_longest_past` for models with states: the longest prefix that ends within the prompt."""
        for blocks in range(len(keys), -1, -1):
            known = self._ends.get(keys[blocks - 1] if blocks else 0, [])
            known = [p for p in known if len(p.tokens) < len(prompt) and p.tokens == prompt[: len(p.tokens)]]
            if known:
                longest = max(known, key=lambda prefix: len(prefix.tokens))
                self._entries.move_to_end(longest.tokens)
                return longest, len(longest.tokens)
            if prompt[: blocks * BLOCK] in held:
                return held[prompt[: blocks * BLOCK]], blocks * BLOCK
        return None, 0

    def _feed(self, rows: list[tuple[tuple[int, ...], Prefix | None, int]]) -> list[Prefix]:
        """Run one prefill over prompts, each behind the past it has; right-aligned, so all end in the last column."""
        model, count = self._model, len(rows)
        window = max(len(prompt) for prompt, _, _ in rows)
        width = max(len(prompt) - known for prompt, _, known in rows)
        tokens = np.zeros((count, width), dtype=np.int64)
        starts = np.empty((count, 1), dtype=np.int64)
        keys, values = model.new_cache(count, window), model.new_cache(count, window)
        states = model.new_states(count)
        for row, (prompt, past, known) in enumerate(rows):
            begin = window - len(prompt)
            starts[row] = begin
            fed = prompt[-width:]
            tokens[row, width - len(fed) :] = fed
            self.fed_tokens += len(prompt) - known
            if past is not None:
                keys[:, row, :, begin : begin + known] = past.keys[:, :, :known]
                values[:, row, :, begin : begin + known] = past.values[:, :, :known]
                if states is not None and past.states is not None:
                    states.put(row, past.states)
        columns = np.arange(window)
        fed_columns = columns[window - width :]
        hidden = (columns < starts[:, :, None]) | (columns > fed_columns[:, None])
        positions = np.maximum(fed_columns - starts, 0)
        new = Continuation([len(prompt) - known for prompt, _, known in rows], states)
        logits = model.prefill(
            torch.from_numpy(tokens), torch.from_numpy(positions), keys, values, torch.from_numpy(hidden), new
        )
        experts: list[Any] = [None] * count
        if (chosen := model.take_chosen()) is not None:  # of the tokens fed just now, row after row
            experts = np.split(chosen.cpu().numpy(), np.cumsum(new.lengths)[:-1])
            for row, (_, past, known) in enumerate(rows):
                if past is not None and past.routed_experts is not None:
                    experts[row] = np.concatenate((past.routed_experts[:known], experts[row]))
        return [
            Prefix(
                prompt,
                keys[:, row, :, window - len(prompt) :],
                values[:, row, :, window - len(prompt) :],
                logits[row],
                self._epoch,
                states=None if states is None else states.of(row),
                routed_experts=experts[row],
            )
            for row, (prompt, _, _) in enumerate(rows)
        ]

    def _remember(self, prefix: Prefix) -> None:
        self._entries[prefix.tokens] = prefix
        self._tokens += len(prefix.tokens) + self._state_tokens
        whole = block_keys(prefix.tokens, proper=False)
        if len(prefix.tokens) % BLOCK == 0:
            prefix.key = whole[-1]
        if self._model.recurrent:
            self._ends.setdefault(whole[-1] if whole else 0, []).append(prefix)
            return
        for key in whole:
            self._index[key] = prefix

    def _forget_oldest(self) -> None:
        tokens, prefix = self._entries.popitem(last=False)
        self._tokens -= len(tokens) + self._state_tokens
        keys = block_keys(tokens, proper=False)
        if self._model.recurrent:
            last = keys[-1] if keys else 0
            self._ends[last].remove(prefix)
            if not self._ends[last]:
                del self._ends[last]
        for key in keys:
            if self._index.get(key) is prefix:
                del self._index[key]


def cells_per_row(counts: Sequence[int]) -> int:
    """The grid width that wastes least for prefixes read by `counts` rows each."""
    widths = {*counts, *(1 << i for i in range(max(counts).bit_length()))}

    def cost(width: int) -> int:
        return sum(-(-count // width) for count in counts) * (width + _ROW_COST)

    return min(sorted(widths, reverse=True), key=cost)


class PrefixGrid:
    """Arranges rows that share prefixes into a grid, so that each prefix is read once a step and not once a row.

    Attention over a shared prefix is one matrix product of all its rows' queries with its keys. Products of one batch
    must have one shape, so prefixes get equally many cells; one with more rows than cells takes several grid rows.

    `view`: what the model reads, None when no row has a prefix.
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
