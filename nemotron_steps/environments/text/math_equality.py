"""math-verify's comparison of two answers: the grader of math_with_judge, for its helper processes."""

from __future__ import annotations

import logging


def compare(answer: str, expected: str, boxed: bool = True) -> bool | None:
    """Whether math-verify calls the two equal; None when the expected answer itself cannot be parsed.

    Both are LaTeX or plain expressions without a box; if not `boxed`, `answer` is a text with such an expression in it.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    # A box is the one delimiter both are sure to be found in. The pool holds the clock: the library's own time-out
    # would pass for "not equal".
    gold = parse(f"\\boxed{{{expected}}}", (LatexExtractionConfig(),), parsing_timeout=None)
    if not gold:
        return None
    text = f"\\boxed{{{answer}}}" if boxed else answer
    found = parse(text, (ExprExtractionConfig(), LatexExtractionConfig()), parsing_timeout=None)
    return bool(verify(gold, found, timeout_seconds=None))
