"""reasoning_gym: procedural tasks graded by the reasoning-gym library's own scorer, chosen by the row's
`metadata.source_dataset`.

The library is imported when the first row is checked or scored. Answers its scorers would evaluate as code pass
expression_guard first; a refused answer, or one of more than MAX_LENGTH characters, is scored as one that cannot be
parsed. Scorers that simplify expressions work in helper processes; of the others none takes a tenth of a second over
so long an answer, whatever it is.
"""

import asyncio
import copy
import math
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from typing import Any, ClassVar

from nemotron_steps.environments.base import Environment, GradeResult, Row, RowError, Session
from nemotron_steps.environments.responses import Response
from nemotron_steps.environments.text.expression_guard import (
    is_bounded_arithmetic,
    is_inert_literal,
    is_non_finite,
    is_plain_number_text,
)
from nemotron_steps.environments.text.extraction import last_answer_tag, last_boxed
from nemotron_steps.errors import UnsupportedError

EVALUATED_AS_LITERAL = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})

EVALUATED_AS_EXPRESSION = frozenset(
    {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
)
"""Data sets whose scorer calls sympy's parse_expr on the answer, and some simplify what it gives."""

COMPARED_AS_TUPLES = frozenset({"arc_agi", "rearc"})
"""Data sets whose scorer compares `metadata.output` with tuples, which JSON turned into lists."""

PAID_FOR_ANYTHING = frozenset({"coin_flip", "game_of_life_halting"})
"""Data sets whose scorer also pays answers of another value in full: a number's first digit, any text."""

MAX_LENGTH = 20_000

UNPARSEABLE = "?"

_BITWISE = frozenset("0123456789abcdefABCDEFxX+-*&|^~<>() ")

Scorer = Callable[..., float]


class ReasoningGym(Environment):
    """See the module docstring. A row has `question`, `answer` and `metadata`, as the library's data sets make them."""

    name: ClassVar[str] = "reasoning_gym"
    required_fields: ClassVar[tuple[str, ...]] = ("question", "metadata.source_dataset")

    def check_values(self, row: Row) -> None:
        if "answer" not in row:
            raise RowError("answer", "the reference answer (null where the data set has none)", "no such field")
        if not isinstance(row["answer"], str | None):
            raise RowError("answer", "a string or null", type(row["answer"]).__name__)
        source = row["metadata"]["source_dataset"]
        if not isinstance(source, str) or scorer_of(source) is None:
            raise RowError("metadata.source_dataset", "a data set of the installed reasoning-gym", repr(source))
        if source == "number_sorting" and not is_inert_literal(str(row["answer"])):
            raise RowError("answer", "a list of numbers", repr(row["answer"])[:80])
        problem = str(row["metadata"].get("problem", ""))
        if source == "bitwise_arithmetic" and (not problem or set(problem) - _BITWISE or "**" in problem):
            raise RowError("metadata.problem", "an expression of hexadecimal numbers", repr(row["metadata"])[:80])
        _, vetted, entry = _vetted(row, f"<answer>{row['answer']}</answer>")
        score, failure = score_answer(vetted, entry)
        if score is None:
            raise RowError("metadata", f"what the scorer of {source} needs", failure[:200])

    async def verify(self, row: Row, response: Response, session: Session) -> GradeResult:
        answer, vetted, entry = _vetted(row, response.text)
        if row["metadata"]["source_dataset"] in EVALUATED_AS_EXPRESSION and vetted is answer:
            score, failure = await self.in_helper(score_answer, vetted, entry)
        else:
            # A thread, because even short work adds up on the event loop.
            score, failure = await asyncio.to_thread(score_answer, vetted, entry)
        return _verdict(answer, vetted, score, failure)

    def grade(self, row: Row, text: str) -> GradeResult:
        """As verify, for callers outside an event loop. `row` needs the verifier fields only."""
        answer, vetted, entry = _vetted(row, text)
        return _verdict(answer, vetted, *score_answer(vetted, entry))


def _vetted(row: Row, text: str) -> tuple[str, str, dict[str, Any]]:
    """(the answer in a text, what the scorer may see of it, the row as the library's entry)."""
    answer = extract_answer(text)
    source, expected = row["metadata"]["source_dataset"], row.get("answer")
    safe = len(answer) <= MAX_LENGTH and is_safe_answer(source, answer)
    safe = safe and (answer == expected or not is_non_finite(answer))
    safe = safe and (source not in PAID_FOR_ANYTHING or _is_same(answer, str(expected)))
    refused = "" if source in PAID_FOR_ANYTHING else UNPARSEABLE
    return answer, answer if safe else refused, {key: row.get(key) for key in ("question", "answer", "metadata")}


def _verdict(answer: str, vetted: str, score: float | None, failure: str) -> GradeResult:
    details = {"extracted_answer": answer[:MAX_LENGTH]}
    if failure:  # over the answer: check_values has tried the row
        details["raised"] = failure
    components = {"score": score or 0.0, "answer_refused": float(vetted is not answer)}
    return GradeResult(score or 0.0, components, details=details)


def score_answer(answer: str, entry: dict[str, Any]) -> tuple[float | None, str]:
    """(score, "") by the library, or (None, what its scorer raised). The answer must have been vetted."""
    entry = copy.deepcopy(entry)
    source = entry["metadata"]["source_dataset"]
    scorer = scorer_of(source)
    if scorer is None:
        return None, f"no data set {source!r} in the installed reasoning-gym"
    if source in COMPARED_AS_TUPLES:
        entry["metadata"]["output"] = _as_tuples(entry["metadata"].get("output"))
    try:
        score = float(scorer(answer=answer, entry=entry))
        return min(1.0, max(0.0, score)) if math.isfinite(score) else 0.0, ""
    except Exception as error:
        return None, repr(error)


@cache
def scorer_of(source: str) -> Scorer | None:
    """The library's scorer of a data set, None if it has none."""
    try:
        import reasoning_gym
    except ImportError as error:
        what = "the reasoning_gym environment needs the reasoning-gym package"
        raise UnsupportedError(what, found=str(error), hints=("pip install reasoning-gym",)) from error
    try:
        return reasoning_gym.get_score_answer_fn(source)  # type: ignore[no-any-return]
    except ValueError:
        return None


def extract_answer(text: str) -> str:
    """The answer of a response: the last <answer> tag, else the last box, else the whole text."""
    found = last_answer_tag(text)
    found = last_boxed(text) if found is None else found
    return text.strip() if found is None else found


def is_safe_answer(source: str, answer: str) -> bool:
    """Whether the scorer of `source` may see this answer; see expression_guard."""
    if source in EVALUATED_AS_LITERAL:
        return is_inert_literal(answer)
    if source in EVALUATED_AS_EXPRESSION:
        return is_bounded_arithmetic(answer)
    return is_plain_number_text(answer)


def _is_same(answer: str, expected: str) -> bool:
    try:
        return abs(Fraction(answer) - Fraction(expected)) <= Fraction(1, 10_000)
    except (ValueError, ZeroDivisionError):
        return answer.strip().lower() == expected.strip().lower()


def _as_tuples(value: Any) -> Any:
    return tuple(_as_tuples(item) for item in value) if isinstance(value, list) else value
