"""Nearest names: the `did you mean` of every error about an unknown key, step, config or profile."""

from __future__ import annotations

from collections.abc import Iterable

ALIKE = 0.8
"""Share of two names' letters that are the same, from which on one is the other mistyped."""


def nearest(name: str, candidates: Iterable[str], limit: int = 3) -> tuple[str, ...]:
    """Up to `limit` candidates that look like `name`, best first; empty when none is close.

    Candidates that share the last dotted or slashed part come first: `max_num_steps` finds `grpo.max_num_steps`,
    `rlhf` finds `rl/nemo_rl/rlhf`. Then those of which it is a word (`gpu` finds `one_gpu`, and not `cpu`) and those
    that differ by a letter of many: `step` finds `steps` before `seconds_per_step`.
    """
    from difflib import SequenceMatcher

    wanted = name.lower()
    tail = _tail(wanted)
    scored: list[tuple[float, str]] = []
    for candidate in set(candidates):
        text = candidate.lower()
        same = SequenceMatcher(None, wanted, text).ratio()
        if _tail(text) == tail:
            score = 2.0 + same
        elif wanted in text.split("_") or same >= ALIKE:
            score = 1.0 + same
        else:
            score = 0.6 * SequenceMatcher(None, tail, _tail(text)).ratio() + 0.4 * same
        if score >= 0.6:
            scored.append((score, candidate))
    scored.sort(key=lambda pair: (-pair[0], pair[1]))
    return tuple(candidate for _, candidate in scored[:limit])


def _tail(name: str) -> str:
    return name.replace("/", ".").rsplit(".", 1)[-1]
