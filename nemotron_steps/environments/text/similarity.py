"""How alike two texts are, by difflib's measure (Ratcliff and Obershelp's)."""

from __future__ import annotations

from difflib import SequenceMatcher


def matching_ratio(first: str, second: str, floor: float) -> float:
    """Twice the matching characters over all characters; where that is below `floor`, any bound from above that is too.

    The bounds take linear time, the ratio itself quadratic or worse: long texts belong in a GradingPool.
    """
    matcher = SequenceMatcher(None, first, second)
    for bound in (matcher.real_quick_ratio, matcher.quick_ratio):
        if bound() < floor:
            return bound()
    return matcher.ratio()
