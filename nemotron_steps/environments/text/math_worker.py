"""The helper process of math_with_judge: math-verify's comparison of two answers, one JSON line each.

Request: {"expected": str, "answer": str}. Answer: {"equal": bool} or {"error": str} when the expected answer itself
cannot be parsed.
"""

from __future__ import annotations

import logging
from typing import Any

from nemotron_steps.environments.line_worker import serve


def compare(request: dict[str, Any]) -> dict[str, Any]:
    """Whether math-verify calls the two answers equal. Both are LaTeX or plain expressions without a box."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    # A box is the one delimiter both are sure to be found in. The parent process holds the clock: the library's own
    # time-out would pass for "not equal".
    gold = parse(f"\\boxed{{{request['expected']}}}", (LatexExtractionConfig(),), parsing_timeout=None)
    if not gold:
        return {"error": "math-verify cannot parse the expected answer"}
    found = parse(
        f"\\boxed{{{request['answer']}}}",
        (ExprExtractionConfig(), LatexExtractionConfig()),
        parsing_timeout=None,
    )
    return {"equal": bool(verify(gold, found, timeout_seconds=None))}


if __name__ == "__main__":
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    serve(compare)
