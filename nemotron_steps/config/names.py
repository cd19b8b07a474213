"""Nearest names: the `did you mean` of every error about an unknown key, step, config or profile."""

from __future__ import annotations

from collections.abc import Iterable


def nearest(name: str, candidates: Iterable[str], limit: int = 3) -> tuple[str, ...]:
    """Up to `limit` candidates that look like `name`, best first; empty when none is close.

    Candidates that share the last dotted or slashed part come first: `max_num_steps` finds `grpo.max_num_steps`,
    `rlhf` finds `rl/nemo_rl/rlhf`. So do those of which it is a word: `gpu` finds `one_gpu`, and not `cpu`.
    """
    from difflib import SequenceMatcher

    wanted = name.lower()
    tail = _tail(wanted)
    scored: list[tuple[float, str]] = []
    for candidate in set(candidates):
        text = candidate.lower()
        if _tail(text) == tail or wanted in text.split("_"):
            score = 1.0 + SequenceMatcher(None, wanted, text).ratio()
        else:
            same_tail = SequenceMatcher(None, tail, _tail(text)).ratio()
            score = 0.6 * same_tail + 0.4 * SequenceMatcher(None, wanted, text).ratio()
        if score >= 0.6:
            scored.append((score, candidate))
    scored.sort(key=lambda pair: (-pair[0], pair[1]))
    return tuple(candidate for _, candidate in scored[:limit])


def _tail(name: str) -> str:
    return name.replace("/", ".").rsplit(".", 1)[-1]
