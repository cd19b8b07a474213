"""Which engine holds the KV cache of a conversation: the one that sampled its last turn.

The next turn's prompt begins with exactly the tokens of the last prompt and its answer, so these are what is
remembered. Prompts alone are not: the rollouts of one prompt would all follow the first of them to one engine.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

BLOCK = 64
"""Tokens hashed at once. What is left over at a conversation's end is compared as it is."""
CONVERSATIONS = 2**15
_ENDS = 64
"""Conversations that are alike up to their last whole block, of which this many are remembered."""


class PrefixMemory:
    """Conversations by their tokens, each with the number of its engine; the least recently noted is forgotten."""

    def __init__(self, conversations: int = CONVERSATIONS) -> None:
        self._limit = conversations
        # Hash of the whole blocks, then the tokens after them.
        self._ends: OrderedDict[int, OrderedDict[tuple[int, ...], int]] = OrderedDict()

    def note(self, tokens: Sequence[int], engine: int) -> None:
        """`engine` has just read or sampled all of `tokens`."""
        key = _hashes(tokens)[-1]
        ends = self._ends.setdefault(key, OrderedDict())
        tail = tuple(tokens[len(tokens) // BLOCK * BLOCK :])
        ends[tail] = engine
        ends.move_to_end(tail)
        if len(ends) > _ENDS:
            ends.popitem(last=False)
        self._ends.move_to_end(key)
        if len(self._ends) > self._limit:
            self._ends.popitem(last=False)

    def find(self, tokens: Sequence[int]) -> int | None:
        """The engine of the longest remembered conversation that `tokens` continue; None when there is none."""
        for blocks, key in reversed([*enumerate(_hashes(tokens))]):
            following = tuple(tokens[blocks * BLOCK : (blocks + 1) * BLOCK])
            fitting = [tail for tail in self._ends.get(key, ()) if following[: len(tail)] == tail]
            if fitting:
                return self._ends[key][max(fitting, key=len)]
        return None

    def clear(self) -> None:
        """The engines have dropped their caches."""
        self._ends.clear()


def _hashes(tokens: Sequence[int]) -> list[int]:
    """Of the first 0, 1, 2, ... whole blocks."""
    hashes = [0]
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        hashes.append(hash((hashes[-1], *tokens[start : start + BLOCK])))
    return hashes
