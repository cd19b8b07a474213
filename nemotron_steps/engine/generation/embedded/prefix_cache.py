"""Keys and values of prompts, computed once and reused: within a group, among prompts that begin alike, over time.

Prompts are cut into blocks of 16 tokens, each named by the hash of everything up to its end. Prompts that share blocks
(judge instructions, a system prompt, an earlier turn of a conversation) share their computation: what enough of them
have in common is computed first, then each prompt is fed from there on. Whatever is found by hash is compared token by
token before it is used. Keys and values can be cut anywhere; the states of a recurrent model cannot, so there a prompt
goes on only from where another one ends.

Not for: the cache of running sequences (decode_batch.py).

Shapes: L layers, h key-value heads, D head size, V vocabulary.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from nemotron_steps.engine.generation.embedded.cached_model import CachedModel, Continuation, States

BLOCK = 16
_WORTHWHILE_TOKENS = 256  # one more forward pass costs about as much as feeding this many tokens
# Attending in two parts costs about as much as reading this many tokens more in every row.
_SHARED_TOKENS = 32
_SHARING_ROWS = 4
_CHUNK_TOKENS = {"cpu": 2048, "cuda": 32_768}  # one prefill pass; on a CPU its activations stay in the cache


@dataclass(eq=False)
class Prefix:
    """The cache of the first tokens of one or more sequences."""

    tokens: tuple[int, ...]
    keys: torch.Tensor
    """[L, h, len(tokens), D]"""
    values: torch.Tensor
    logits: torch.Tensor | None
    """float32 [V] of the token that follows; None for a prefix cut from a longer one"""
    epoch: int
    """How often the weights had changed when it was computed"""
    key: int | None = None
    """Block key of the whole prefix, when it is a whole number of blocks"""
    states: States | None = None
    """After its last token; None for models without, and for a prefix cut from a longer one"""
    routed_experts: npt.NDArray[np.int16] | None = None
    """[len(tokens), mixtures, k], where they are recorded; None for a prefix cut from a longer one"""

    def cut(self, blocks: int, key: int) -> Prefix:
        """The first `blocks` blocks, sharing memory; for attention to read, not to be continued by a state."""
        end = blocks * BLOCK
        return Prefix(self.tokens[:end], self.keys[:, :, :end], self.values[:, :, :end], None, self.epoch, key)


def block_keys(tokens: Sequence[int], *, proper: bool = True) -> list[int]:
    """One key a block of the prompt, each naming everything up to its end.

    Args:
        proper: leave out a block that would end the prompt, since its last token must be fed to sample the next.
    """
    keys: list[int] = []
    key = 0
    for end in range(BLOCK, len(tokens) + (0 if proper else 1), BLOCK):
        key = hash((key, *tokens[end - BLOCK : end]))
        keys.append(key)
    return keys


class PrefixCache:
    """Computes prompts and remembers them, least recently used first out.

    Args:
        max_tokens: prompt tokens remembered, states counting as what takes as much memory; what running sequences hold
            on to is not counted.
    """

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
        shared = self._shared_prefixes(missing)
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
                self._remember(prefix, missing[prefix.tokens])
            begin = end
        self._trim()
        return done

    def choose_shared(self, prompts: Sequence[Prefix], live: Iterable[Prefix]) -> list[Prefix | None]:
        """What each joining row should read together with others while it is decoded; None where nothing is worth it.

        Rows of one prompt share all of it. Otherwise a row shares the longest beginning that enough joining rows
        have in common, or that running rows share already.

        Args:
            prompts: the computed prompt of each joining row.
            live: prefixes that running rows share, of any weight version.
        """
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

    def _shared_prefixes(self, prompts: dict[tuple[int, ...], list[int]]) -> set[tuple[int, ...]]:
        """For each prompt the longest prefix that saves enough tokens by being computed first, unless it is known."""
        counts = Counter(key for keys in prompts.values() for key in keys)
        shared: set[tuple[int, ...]] = set()
        for prompt, keys in prompts.items():
            for blocks in range(len(keys), 0, -1):
                key = keys[blocks - 1]
                if (counts[key] - 1) * blocks * BLOCK >= _WORTHWHILE_TOKENS:
                    if not self._knows(prompt, keys, blocks):
                        shared.add(prompt[: blocks * BLOCK])
                    break
        return shared

    def _knows(self, prompt: tuple[int, ...], keys: list[int], blocks: int) -> bool:
        """Whether a prompt can be fed from behind its first blocks, or further on."""
        if not self._model.recurrent:
            return keys[blocks - 1] in self._index
        return self._longest_end(prompt, keys, {})[1] >= blocks * BLOCK

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
        chosen = _with_past(model.take_chosen(), rows)
        return [
            Prefix(
                prompt,
                keys[:, row, :, window - len(prompt) :],
                values[:, row, :, window - len(prompt) :],
                logits[row],
                self._epoch,
                states=None if states is None else states.of(row),
                routed_experts=chosen[row],
            )
            for row, (prompt, _, _) in enumerate(rows)
        ]

    def _remember(self, prefix: Prefix, keys: list[int]) -> None:
        self._entries[prefix.tokens] = prefix
        self._tokens += len(prefix.tokens) + self._state_tokens
        whole = keys if len(prefix.tokens) % BLOCK else block_keys(prefix.tokens, proper=False)
        if whole is not keys:
            prefix.key = whole[-1]
        if self._model.recurrent:
            self._ends.setdefault(whole[-1] if whole else 0, []).append(prefix)
            return
        for key in whole:
            self._index[key] = prefix

    def _trim(self) -> None:
        while self._tokens > self._max_tokens and self._entries:
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


def _with_past(
    chosen: torch.Tensor | None, rows: list[tuple[tuple[int, ...], Prefix | None, int]]
) -> list[npt.NDArray[np.int16] | None]:
    """The experts of each prompt, of which those of tokens fed just now are `chosen`, row after row."""
    if chosen is None:
        return [None] * len(rows)
    fed = chosen.cpu().numpy()
    whole: list[npt.NDArray[np.int16] | None] = []
    begin = 0
    for prompt, past, known in rows:
        own = fed[begin : begin + len(prompt) - known]
        begin += len(own)
        before = None if past is None or not known else past.routed_experts
        whole.append(own if before is None else np.concatenate((before[:known], own)))
    return whole
