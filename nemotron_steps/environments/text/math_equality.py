"""math-verify's comparison of two answers: the grader of math_with_judge, for its helper processes."""

from __future__ import annotations

import logging


def compare(answer: str, expected: str) -> bool | None:
    """Whether math-verify calls the two equal; None when the expected answer itself cannot be parsed.

    Both are LaTeX or plain expressions without a box.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    # A box is the one delimiter both are sure to be found in. The pool holds the clock: the library's own time-out
    # would pass for "not equal".
    gold = parse(f"\\boxed{{{expected}}}", (LatexExtractionConfig(),), parsing_timeout=None)
    if not gold:
        return None
    found = parse(f"\\boxed{{{answer}}}", (ExprExtractionConfig(), LatexExtractionConfig()), parsing_timeout=None)
    return bool(verify(gold, found, timeout_seconds=None))
