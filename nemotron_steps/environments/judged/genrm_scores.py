"""The arithmetic of GenRM comparison: which pairs, what a reply means, and how comparisons become rewards.

Pure functions, no judge and no rows. The rule follows public NeMo-Gym's `genrm_compare`: base score = mean over a
answer's comparisons, plus bonuses and zero-centred group terms on lengths and style.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Literal

from nemotron_steps.environments.text.extraction import json_values

Strategy = Literal["circular", "all_pairs"]

RANKING_MIDPOINT = 3.5
SCORE_RANGE = (1.0, 5.0)
RANKING_RANGE = (1.0, 6.0)

_FENCE = re.compile(r"```json\s*(.*?)```", re.IGNORECASE | re.DOTALL)
_CODE_BLOCK = re.compile(r"```.*?```", re.DOTALL)
_STYLE_MARKS = (
    re.compile(r"^#{1,6}\s", re.MULTILINE),  # headers
    re.compile(r"^[^\S\n]*(?:\d+\.|[-*+])\s", re.MULTILINE),  # list items
    re.compile(r"\*\*[^*\n]+\*\*"),  # bold
    re.compile(r"__[^_\n]+__"),
    # Emoji and symbols. NeMo-Gym counts all from U+24C2 to U+1F251: every character of Chinese, Japanese and Korean, of
    # full width, and that draws a table.
    re.compile("[\u24c2\u25a0-\u27bf\u2b00-\u2bff\ufe0f\U0001f000-\U0001faff]"),
)


@dataclass(frozen=True)
class Comparison:
    """One judge reply about answers i (shown first) and j. Scores in 1-5; ranking 1 (i much better) to 6."""

    i: int
    j: int
    score_1: float
    score_2: float
    ranking: float
    parsed: bool = True
    """False when no reply could be parsed and the defaults stand in."""
    note: Mapping[str, str] = field(default_factory=dict)
    """What the judge said, cut (notes.py)."""


def pairs(strategy: Strategy, n: int) -> list[tuple[int, int]]:
    """Ordered pairs to compare among n answers: n of them for circular, n(n-1)/2 for all_pairs, none below 2."""
    if n < 2:
        return []
    if strategy == "circular":
        return [(i, (i + 1) % n) for i in range(n)]
    return list(combinations(range(n), 2))


def parse_reply(text: str, default_score: float, default_ranking: float) -> tuple[float, float, float] | None:
    """(score_1, score_2, ranking) of a judge's reply: the first valid fenced JSON, else the last valid object.

    Valid: an object (or its `overall`) with at least one of the three keys, each a number in its range; an absent key
    takes its default. None when nothing valid is there.
    """
    for fence in _FENCE.finditer(text):
        for raw, value in json_values(fence.group(1), "{"):
            found = _scores(raw, value, default_score, default_ranking)
            if found is not None:
                return found
    last = None
    for raw, value in json_values(text, "{"):
        last = _scores(raw, value, default_score, default_ranking) or last
    return last


def _scores(
    raw: str, value: dict[str, Any], default_score: float, default_ranking: float
) -> tuple[float, float, float] | None:
    if isinstance(value.get("overall"), dict):
        value = value["overall"]
    # Keys must be spelled out: an escaped spelling in a reply is quoted from an answer that tries to write the verdict.
    present = [key for key in ("score_1", "score_2", "ranking") if key in value and f'"{key}"' in raw]
    if not present:
        return None
    score_1 = _number(value.get("score_1", default_score), SCORE_RANGE)
    score_2 = _number(value.get("score_2", default_score), SCORE_RANGE)
    ranking = _number(value.get("ranking", default_ranking), RANKING_RANGE)
    if score_1 is None or score_2 is None or ranking is None:
        return None
    return score_1, score_2, ranking


def _number(value: Any, bounds: tuple[float, float]) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) and bounds[0] <= number <= bounds[1] else None


def base_scores(comparisons: Sequence[Comparison], n: int, default_score: float) -> list[float]:
    """Mean score of each of n answers over its comparisons; ties are broken by the ranking.

    Where score_1 equals score_2, score_1 gains 3.5 - ranking and score_2 loses it (simple_tiebreaker).
    """
    totals = [0.0] * n
    counts = [0] * n
    for item in comparisons:
        shift = RANKING_MIDPOINT - item.ranking if item.score_1 == item.score_2 else 0.0
        totals[item.i] += item.score_1 + shift
        totals[item.j] += item.score_2 - shift
        counts[item.i] += 1
        counts[item.j] += 1
    return [total / count if count else default_score for total, count in zip(totals, counts, strict=True)]


def shortest_bonus(scores: Sequence[float], lengths: Sequence[int], bonus: float, top_percentile: float) -> list[float]:
    """`bonus` for the answer with the shortest non-zero length, if its score is among the top; zeros elsewhere.

    The threshold is the sorted-descending score at max(0, int(n * top_percentile) - 1). Of equals the first wins.
    """
    gained = [0.0] * len(scores)
    candidates = [index for index, length in enumerate(lengths) if length > 0]
    if not candidates or bonus == 0.0:
        return gained
    threshold = sorted(scores, reverse=True)[max(0, int(len(scores) * top_percentile) - 1)]
    shortest = min(candidates, key=lambda index: lengths[index])
    if scores[shortest] >= threshold:
        gained[shortest] = bonus
    return gained


def centred_weights(values: Sequence[float]) -> list[float]:
    """w = 1 - (value - min) / (max - min), minus the group's mean of w: smaller is better, the sum is 0."""
    low, high = min(values), max(values)
    if low == high:
        return [0.0] * len(values)
    raw = [1.0 - (value - low) / (high - low) for value in values]
    mean = sum(raw) / len(raw)
    return [weight - mean for weight in raw]


def style_density(text: str) -> float:
    """Markdown marks (headers, list items, bold, emoji) per character, code blocks left out of both."""
    prose = _CODE_BLOCK.sub("", text)
    length = len(prose.strip())
    return sum(len(mark.findall(prose)) for mark in _STYLE_MARKS) / length if length else 0.0
